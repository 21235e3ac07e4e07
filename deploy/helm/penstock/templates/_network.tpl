{{/* The ports of *addresses* (host:port or URLs, several hosts with commas), as a YAML list without repetition. */}}
{{- define "penstock.ports" -}}
{{- $ports := list -}}
{{- range $address := .addresses -}}
{{- $usual := $.usual | default (ternary 80 443 (hasPrefix "http:" $address)) -}}
{{- $hosts := regexReplaceAll "[/?].*$" (regexReplaceAll "^([a-z0-9+]+:)*//([^@/]*@)?" $address "") "" -}}
{{- range splitList "," $hosts -}}
{{- $port := regexFind ":[0-9]+$" . | trimPrefix ":" -}}
{{- $ports = append $ports (int (default $usual $port)) -}}
{{- end -}}
{{- end -}}
{{- toYaml ($ports | uniq) -}}
{{- end }}

{{/*
One rule of egress to what networkPolicy.to calls *name*: on the ports networkPolicy.ports names, else on those of the
*addresses* (the *usual* one where an address has none). Without any, no rule.
*/}}
{{- define "penstock.egressTo" -}}
{{- $policy := .top.Values.networkPolicy -}}
{{- if .addresses }}
- ports:
    {{- range $port := get $policy.ports .name | default (include "penstock.ports" . | fromYamlArray) }}
    {{- range $protocol := ternary (list "UDP" "TCP") (list "TCP") (eq $.name "dns") }}
    - {port: {{ int $port }}, protocol: {{ $protocol }}}
    {{- end }}
    {{- end }}
  {{- with get $policy.to .name }}
  to:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}
{{- end }}

{{/* Where an object store is: its endpoint, where the options name one, else wherever the provider's is. */}}
{{- define "penstock.storeAddress" -}}
{{- $address := ternary "https://" "" (regexMatch "^(s3|gs|az)" (default "" .url)) -}}
{{- range $name, $value := .options -}}
{{- if contains "endpoint" $name -}}
{{- $address = $value -}}
{{- end -}}
{{- end -}}
{{- $address -}}
{{- end }}

{{/* What every pod may reach: names, databases, the bus, signals, objects, the keys of tokens, traces, and each other. */}}
{{- define "penstock.egress" -}}
{{- $config := .Values.config -}}
{{- $databases := list .Values.database.url
  (dig "tracking" "database" "url" "" $config)
  (dig "refdata" "postgres" "jdbcUrl" "" $config)
  (dig "refdata" "postgres" "url" "" $config)
  (dig "flows" "database" "url" "" $config) | compact -}}
{{- $redis := concat (.Values.signals.redis.nodes | default list) (dig "refdata" "redis" "nodes" (list) $config) -}}
{{- $ingest := dict "url" (dig "ingest" "root" "" $config) "options" (dig "ingest" "options" (dict) $config) -}}
{{- $web := list .Values.auth.jwt.jwks_url
  (include "penstock.storeAddress" .Values.storage) (include "penstock.storeAddress" $ingest) | compact -}}
{{- $traces := list (dig "telemetry" "otlp_endpoint" "" $config) | compact -}}
{{- $kafka := list .Values.bus.kafka.bootstrap | compact -}}
{{- include "penstock.egressTo" (dict "top" . "name" "dns" "addresses" (list "dns") "usual" 53) -}}
{{- include "penstock.egressTo" (dict "top" . "name" "postgres" "addresses" $databases "usual" 5432) -}}
{{- include "penstock.egressTo" (dict "top" . "name" "kafka" "addresses" $kafka "usual" 9092) -}}
{{- include "penstock.egressTo" (dict "top" . "name" "redis" "addresses" $redis "usual" 6379) -}}
{{- include "penstock.egressTo" (dict "top" . "name" "web" "addresses" $web) -}}
{{- include "penstock.egressTo" (dict "top" . "name" "traces" "addresses" $traces) }}
- to:
    - podSelector:
        matchLabels:
          {{- include "penstock.selector" . | nindent 10 }}
  ports: [{port: 8080, protocol: TCP}, {port: 8081, protocol: TCP}]
{{- with .Values.networkPolicy.extraEgress }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* What harvest, flows and ingest may reach besides: HTTPS anywhere, and the other ports that are configured. */}}
{{- define "penstock.egressOutward" -}}
{{- $config := .Values.config -}}
{{- $web := list "https://" (dig "flows" "images" "url" "" $config) (dig "flows" "llm" "url" "" $config) -}}
{{- $web = concat $web (dig "flows" "http" "allow" (list) $config) -}}
{{- range dig "harvest" "feeds" (dict) $config -}}
{{- $web = append $web (dig "source" "url" "" .) -}}
{{- end -}}
{{- range dig "harvest" "alerts" "webhooks" (list) $config -}}
{{- $web = append $web .url -}}
{{- end -}}
{{- with dig "harvest" "alerts" "email" (dict) $config -}}
{{- $web = append $web (printf "%s:%d" .host (int (default 25 .port))) -}}
{{- end -}}
{{- include "penstock.egressTo" (dict "top" . "name" "web" "addresses" (compact $web)) -}}
{{- end }}
