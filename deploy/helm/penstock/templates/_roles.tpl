{{/*
The roles there are: what each runs and on which port. `serves`: others call it. `scales`: more of them do more.
`stores`: it reads and writes objects that the others see. `margin`: seconds it may take to end, beyond draining.
*/}}
{{- define "penstock.facts" -}}
api: {args: [serve, api], port: 8080, serves: true, scales: true, stores: true, margin: 15}
command-api: {args: [serve, command-api], port: 8080, serves: true, scales: true, margin: 15}
query: {args: [serve, query-api], port: 8081, serves: true, scales: true, margin: 15}
apply: {args: [work, apply], port: 8080, scales: true, margin: 15}
relay: {args: [work, relay], port: 8080, margin: 15}
kafka-adapter: {args: [work, kafka-adapter], port: 8080, margin: 15}
harvest: {args: [work, harvest], port: 8080, scales: true, stores: true, margin: 15}
flows: {args: [work, flows], port: 8080, scales: true, stores: true, margin: 15}
# A stopping run gets 30 seconds to finish.
ingest: {args: [ingest, watch], port: 8080, margin: 45}
{{- end }}

{{/* The roles that run here, each with its facts and its values: those of all roles, then its own. */}}
{{- define "penstock.roles" -}}
{{- $config := .Values.config -}}
{{- $idle := dict
  "kafka-adapter" (empty (dig "refdata" "kafka" "externalTopics" (list) $config))
  "harvest" (empty (dig "harvest" "feeds" (dict) $config))
  "ingest" (empty (dig "ingest" "root" "" $config)) -}}
{{- $roles := dict -}}
{{- range $name, $facts := include "penstock.facts" . | fromYaml -}}
{{- $own := get $.Values.roles $name | default dict -}}
{{- $role := mustMergeOverwrite (deepCopy $.Values.defaults) (deepCopy $own) $facts -}}
{{- range $list := list "extraEnv" "extraVolumes" "extraVolumeMounts" -}}
{{- $_ := set $role $list (concat (get $.Values.defaults $list) (get $own $list | default list)) -}}
{{- end -}}
{{- if and $role.enabled (not (get $idle $name)) -}}
{{- if and $role.stores (not (or $.Values.storage.url $.Values.storage.existingClaim)) -}}
{{- fail (printf "storage: give storage.url or storage.existingClaim, or set roles.%s.enabled: false; its pods share objects" $name) -}}
{{- end -}}
{{- $_ := set $role "isScaled" (and $role.scales $role.autoscaling.enabled) -}}
{{- $_ := set $roles $name $role -}}
{{- end -}}
{{- end -}}
{{- toYaml $roles -}}
{{- end }}

{{/* What tells the pods of one role from all others; takes the release as `top` and the role's name as `role`. */}}
{{- define "penstock.roleSelector" -}}
{{ include "penstock.selector" .top }}
app.kubernetes.io/component: {{ .role }}
{{- end }}

{{- define "penstock.mebibytes" -}}
{{- if hasSuffix "Gi" . -}}
{{- mul 1024 (trimSuffix "Gi" . | int) -}}
{{- else -}}
{{- trimSuffix "Mi" . -}}
{{- end -}}
{{- end }}

{{/* Mebibytes of the volume the dictionaries are in: the file of a full memory is an eighth larger. */}}
{{- define "penstock.queryMemory" -}}
{{- add (div (mul 9 (int .Values.query.memoryLimitMb)) 8) 16 -}}
{{- end }}

{{/* A role's resources; what a query pod keeps in its memory-backed volume is charged to its container. */}}
{{- define "penstock.resources" -}}
{{- $resources := deepCopy .values.resources -}}
{{- if eq .role "query" -}}
{{- range $kind := list "requests" "limits" -}}
{{- $some := get $resources $kind -}}
{{- $own := include "penstock.mebibytes" $some.memory | int -}}
{{- $_ := set $some "memory" (printf "%dMi" (add $own (include "penstock.queryMemory" $.top | int))) -}}
{{- end -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end }}
