{{/* A Deployment; takes {root, name}, and `single` for services of which only one may run. */}}
{{- define "pando.deployment" -}}
{{- $values := index .root.Values .name -}}
apiVersion: apps/v1
kind: Deployment
metadata:
  {{- include "pando.workloadMetadata" . | nindent 2 }}
spec:
  {{- if .single }}
  replicas: 1
  strategy: {type: Recreate}
  {{- else }}
  {{- if eq (dig "autoscaling" "mode" "off" $values) "off" }}
  replicas: {{ $values.replicas }}
  {{- end }}
  strategy:
    type: RollingUpdate
    rollingUpdate: {maxSurge: 1, maxUnavailable: 0}
  {{- end }}
  progressDeadlineSeconds: {{ add .root.Values.model.loadSeconds 120 }}
  selector:
    matchLabels:
      {{- include "pando.selector" . | nindent 6 }}
  template:
    {{- include "pando.podTemplate" . | nindent 4 }}
{{- end -}}
