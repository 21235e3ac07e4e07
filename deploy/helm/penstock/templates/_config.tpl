{{/* Secrets and public keys as files of /etc/penstock/secrets: [{secret or configMap, key, path}] */}}
{{- define "penstock.secretFiles" -}}
{{- $files := list -}}
{{- with .Values.database -}}
{{- if .existingSecret -}}
{{- $files = append $files (dict "secret" .existingSecret "key" .existingSecretKey "path" "database-password") -}}
{{- end -}}
{{- end -}}
{{- with .Values.bus.kafka -}}
{{- $secret := .existingSecret -}}
{{- range $setting, $key := .secretKeys -}}
{{- $files = append $files (dict "secret" $secret "key" $key "path" (printf "kafka-%s" $setting)) -}}
{{- end -}}
{{- end -}}
{{- with .Values.signals.redis -}}
{{- if .existingSecret -}}
{{- $files = append $files (dict "secret" .existingSecret "key" (default "password" .existingSecretKey) "path" "redis-password") -}}
{{- end -}}
{{- end -}}
{{- with .Values.storage -}}
{{- $secret := .existingSecret -}}
{{- range $setting, $key := .secretKeys -}}
{{- $files = append $files (dict "secret" $secret "key" $key "path" (printf "storage-%s" $setting)) -}}
{{- end -}}
{{- end -}}
{{- with .Values.auth.jwt -}}
{{- if .existingSecret -}}
{{- $files = append $files (dict "secret" .existingSecret "key" (default "secret" .existingSecretKey) "path" "jwt-secret") -}}
{{- end -}}
{{- if .jwksConfigMap -}}
{{- $files = append $files (dict "configMap" .jwksConfigMap "key" (default "jwks.json" .jwksConfigMapKey) "path" "jwks.json") -}}
{{- end -}}
{{- end -}}
{{- range .Values.secrets.files -}}
{{- $files = append $files (dict "secret" .existingSecret "key" .key "path" .path) -}}
{{- end -}}
{{- toYaml $files -}}
{{- end }}

{{/* References to the files that `secretKeys` become, by setting. */}}
{{- define "penstock.references" -}}
{{- $references := dict -}}
{{- range $setting, $_ := .keys -}}
{{- $_ := set $references $setting (printf "file:/etc/penstock/secrets/%s-%s" $.of $setting) -}}
{{- end -}}
{{- toYaml $references -}}
{{- end }}

{{/* penstock.yaml */}}
{{- define "penstock.config" -}}
{{- $secrets := "/etc/penstock/secrets" -}}
{{- $config := deepCopy .Values.config -}}
{{- $_ := set $config "data_dir" "/var/lib/penstock" -}}
{{- $_ := set $config "server" .Values.server -}}

{{- $database := omit .Values.database "existingSecret" "existingSecretKey" -}}
{{- if .Values.database.existingSecret -}}
{{- $_ := set $database "password" (printf "file:%s/database-password" $secrets) -}}
{{- end -}}
{{- $_ := set $config "database" $database -}}

{{- $bus := omit .Values.bus "kafka" -}}
{{- with .Values.bus.kafka -}}
{{- $kafka := omit . "existingSecret" "secretKeys" -}}
{{- with .secretKeys -}}
{{- $_ := set $kafka "secrets" (include "penstock.references" (dict "keys" . "of" "kafka") | fromYaml) -}}
{{- end -}}
{{- $_ := set $bus "kafka" $kafka -}}
{{- end -}}
{{- with $bus -}}
{{- $_ := set $config "bus" . -}}
{{- end -}}

{{- with .Values.signals.redis -}}
{{- $redis := omit . "existingSecret" "existingSecretKey" -}}
{{- if .existingSecret -}}
{{- $_ := set $redis "password" (printf "file:%s/redis-password" $secrets) -}}
{{- end -}}
{{- $_ := set $config "signals" (dict "redis" $redis) -}}
{{- end -}}

{{- with .Values.storage -}}
{{- if .existingClaim -}}
{{- $_ := set $config "storage" (dict "url" "file:///var/lib/penstock-objects") -}}
{{- else if .url -}}
{{- $storage := dict "url" .url "options" .options -}}
{{- with .secretKeys -}}
{{- $_ := set $storage "secrets" (include "penstock.references" (dict "keys" . "of" "storage") | fromYaml) -}}
{{- end -}}
{{- $_ := set $config "storage" $storage -}}
{{- end -}}
{{- end -}}

{{- with .Values.auth.jwt -}}
{{- $jwt := omit . "existingSecret" "existingSecretKey" "jwksConfigMap" "jwksConfigMapKey" -}}
{{- if .existingSecret -}}
{{- $_ := set $jwt "secret" (printf "file:%s/jwt-secret" $secrets) -}}
{{- $_ := set $jwt "algorithms" (list "HS256") -}}
{{- end -}}
{{- if .jwksConfigMap -}}
{{- $_ := set $jwt "jwks_file" (printf "%s/jwks.json" $secrets) -}}
{{- end -}}
{{- $_ := set $config "auth" (dict "jwt" $jwt) -}}
{{- end -}}

{{- $refdata := get $config "refdata" | default dict -}}
{{- $query := get $refdata "query" | default dict -}}
{{- $_ := set $query "memoryDir" "/var/lib/penstock-memory" -}}
{{- $_ := set $query "memoryLimitMb" .Values.query.memoryLimitMb -}}
{{- $_ := set $query "processes" .Values.query.processes -}}
{{- $_ := set $refdata "query" $query -}}
{{- $_ := set $config "refdata" $refdata -}}
{{- toYaml $config -}}
{{- end }}

{{/* Changes with all that is read at the start only: not with what running processes take over from the file. */}}
{{- define "penstock.startChecksum" -}}
{{- $config := include "penstock.config" . | fromYaml -}}
{{- $_ := set $config "refdata" (omit $config.refdata "dictionaries" "tenants") -}}
{{- $telemetry := omit (get $config "telemetry" | default dict) "log_level" -}}
{{- $config = omit $config "telemetry" -}}
{{- with $telemetry -}}
{{- $_ := set $config "telemetry" . -}}
{{- end -}}
{{- toJson $config | sha256sum -}}
{{- end }}
