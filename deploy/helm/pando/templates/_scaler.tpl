{{/* The autoscaler of a component; takes {root, name, kind, scaling} and metrics {cpuPercent, averages: {metric: target per pod, or 0}}. */}}
{{- define "pando.scaler" -}}
{{- $target := dict "apiVersion" (ternary "leaderworkerset.x-k8s.io/v1" "apps/v1" (eq .kind "LeaderWorkerSet")) "kind" .kind "name" (include "pando.name" .) -}}
{{- if eq .scaling.mode "hpa" }}
---
apiVersion: autoscaling/v2
kind: HorizontalPodAutoscaler
metadata:
  {{- include "pando.metadata" . | nindent 2 }}
spec:
  scaleTargetRef:
    {{- toYaml $target | nindent 4 }}
  minReplicas: {{ .scaling.minReplicas }}
  maxReplicas: {{ .scaling.maxReplicas }}
  behavior:
    scaleDown: {stabilizationWindowSeconds: {{ .scaling.cooldownSeconds }}}
  metrics:
    {{- with .metrics.cpuPercent }}
    - type: Resource
      resource: {name: cpu, target: {type: Utilization, averageUtilization: {{ . }}}}
    {{- end }}
    {{- range $metric, $average := .metrics.averages }}
    {{- if $average }}
    - type: Pods
      pods:
        metric: {name: {{ $metric }}}
        target: {type: AverageValue, averageValue: {{ $average | quote }}}
    {{- end }}
    {{- end }}
{{- else if eq .scaling.mode "keda" }}
---
apiVersion: keda.sh/v1alpha1
kind: ScaledObject
metadata:
  {{- include "pando.metadata" . | nindent 2 }}
spec:
  scaleTargetRef:
    {{- toYaml $target | nindent 4 }}
  minReplicaCount: {{ .scaling.minReplicas }}
  maxReplicaCount: {{ .scaling.maxReplicas }}
  # `cooldownPeriod` only concerns the way to zero replicas.
  advanced:
    horizontalPodAutoscalerConfig:
      behavior:
        scaleDown: {stabilizationWindowSeconds: {{ .scaling.cooldownSeconds }}}
  triggers:
    {{- with .metrics.cpuPercent }}
    - type: cpu
      metricType: Utilization
      metadata: {value: {{ . | quote }}}
    {{- end }}
    {{- range $metric, $average := .metrics.averages }}
    {{- if $average }}
    - type: prometheus
      metricType: AverageValue
      metadata:
        serverAddress: {{ $.root.Values.keda.prometheus | quote }}
        query: sum({{ $metric }}{namespace={{ $.root.Release.Namespace | quote }}, pod=~"{{ include "pando.name" $ }}-.*"})
        threshold: {{ $average | quote }}
    {{- end }}
    {{- end }}
{{- end }}
{{- end -}}
