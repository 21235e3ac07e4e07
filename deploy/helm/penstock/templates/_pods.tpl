{{/* What all pods have in common, in front of their containers; `account` is their ServiceAccount. */}}
{{- define "penstock.podBase" -}}
serviceAccountName: {{ .account }}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .top.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
securityContext:
  runAsNonRoot: true
  {{- range $key := list "runAsUser" "runAsGroup" "fsGroup" }}
  {{- with get $.top.Values.securityContext $key }}
  {{ $key }}: {{ int . }}
  {{- end }}
  {{- end }}
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile:
    type: RuntimeDefault
{{- end }}

{{/* A container of our image; its name and args come before it. */}}
{{- define "penstock.containerBase" -}}
image: {{ include "penstock.image" . }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
command: [penstock]
securityContext:
  runAsNonRoot: true
  readOnlyRootFilesystem: true
  allowPrivilegeEscalation: false
  capabilities:
    drop: [ALL]
  seccompProfile:
    type: RuntimeDefault
{{- end }}

{{- define "penstock.env" -}}
- name: HOME
  value: /tmp
- name: PENSTOCK_CONFIG
  value: /etc/penstock/config/penstock.yaml
{{- range .Values.secrets.env }}
- name: {{ .name }}
  valueFrom:
    secretKeyRef:
      name: {{ .existingSecret }}
      key: {{ .key }}
{{- end }}
{{- end }}

{{/* The configuration as a whole folder: a file mounted by subPath would never change. */}}
{{- define "penstock.mounts" -}}
- name: config
  mountPath: /etc/penstock/config
  readOnly: true
{{- if include "penstock.secretFiles" . | fromYamlArray }}
- name: secrets
  mountPath: /etc/penstock/secrets
  readOnly: true
{{- end }}
- name: data
  mountPath: /var/lib/penstock
- name: tmp
  mountPath: /tmp
{{- if .Values.storage.existingClaim }}
- name: objects
  mountPath: /var/lib/penstock-objects
{{- end }}
{{- end }}

{{- define "penstock.volumes" -}}
- name: config
  configMap:
    name: {{ .configMap }}
{{- with include "penstock.secretFiles" .top | fromYamlArray }}
- name: secrets
  projected:
    defaultMode: 288 # 0440
    sources:
      {{- range . }}
      - {{ ternary "secret" "configMap" (hasKey . "secret") }}:
          name: {{ default .configMap .secret }}
          items:
            - key: {{ .key }}
              path: {{ .path }}
      {{- end }}
{{- end }}
- name: data
  emptyDir:
    sizeLimit: 1Gi
- name: tmp
  emptyDir:
    sizeLimit: {{ .tmpSize }}
{{- with .top.Values.storage.existingClaim }}
- name: objects
  persistentVolumeClaim:
    claimName: {{ . }}
{{- end }}
{{- end }}

{{- define "penstock.probe" -}}
httpGet:
  path: /actuator/health/{{ . }}
  port: http
{{- end }}
