{{/* The services, and encoders, which are workers: ports, modules and health names, for pods, probes and policies; drain times that are constants. */}}
{{- define "pando.pipeline" -}}

gateway: {module: gateway, port: 8000, metrics: 9095}
tokenizer: {module: services.tokenizer, port: 50051, metrics: 9091, health: pando.v1.Tokenizer, drain: 5}
scheduler: {module: services.scheduler, port: 50052, metrics: 9092, health: pando.v1.Scheduler}
worker: {module: services.worker, port: 50053, metrics: 9093, health: pando.v1.Worker}
detokenizer: {module: services.detokenizer, port: 50054, metrics: 9094, health: pando.v1.Detokenizer, drain: 15}
encoder: {module: services.worker, port: 50153, metrics: 9153, health: pando.v1.Worker, drain: 0}
{{- end -}}

{{/* The ranks of a group: those of all stages. */}}
{{- define "pando.ranks" -}}
{{- mul (int .Values.worker.tensorParallel) (int .Values.worker.pipelineParallel) -}}
{{- end -}}

{{- define "pando.ranksPerPod" -}}
{{- $worker := .Values.worker -}}
{{- $all := include "pando.ranks" . | int -}}
{{- $ranks := $worker.ranksPerPod | default $all | int -}}
{{- if mod $all $ranks -}}
{{- fail (printf "worker.tensorParallel (%d) times worker.pipelineParallel (%d) must be a multiple of worker.ranksPerPod (%d)" (int $worker.tensorParallel) (int $worker.pipelineParallel) $ranks) -}}
{{- end -}}
{{- $ranks -}}
{{- end -}}

{{/* The processes of a container: ranks, or encoders beside them; takes the parameters of pando.container. */}}
{{- define "pando.processes" -}}
{{- if eq .name "worker" }}{{ include "pando.ranksPerPod" .root }}
{{- else if and (eq .name "encoder") (hasKey . "pod") }}{{ .root.Values.encoder.replicas }}
{{- else }}1
{{- end -}}
{{- end -}}

{{- define "pando.workerPods" -}}
{{- div (include "pando.ranks" . | int) (include "pando.ranksPerPod" . | int) -}}
{{- end -}}

{{/* Settings of the state that gateways share, as JSON; refuses several gateways without one. */}}
{{- define "pando.state" -}}
{{- $gateway := .Values.gateway -}}
{{- $state := $gateway.state -}}
{{- $most := int $gateway.replicas -}}
{{- if ne $gateway.autoscaling.mode "off" }}{{ $most = int $gateway.autoscaling.maxReplicas }}{{ end -}}
{{- $settings := dict "failure" $state.failure -}}
{{- if $state.signingSecret }}{{ $_ := set $settings "secret" "file:/etc/pando/state-signing/secret" }}{{ end -}}
{{- if and $state.url $state.existingSecret -}}
{{- fail "name gateway.state.url or gateway.state.existingSecret, not both" -}}
{{- else if $state.existingSecret -}}
{{- dict "state" (merge (dict "url" "file:/etc/pando/state/url") $settings) | toJson -}}
{{- else if $state.url -}}
{{- dict "state" (merge (dict "url" $state.url) $settings) | toJson -}}
{{- else if $state.signingSecret -}}
{{- fail "gateway.state.signingSecret is for gateways that share a state: set gateway.state.url or gateway.state.existingSecret" -}}
{{- else if gt $most 1 -}}
{{- fail (printf "%d gateways need a state that they share, or limits count once for each and responses are not found: set gateway.state.url or gateway.state.existingSecret to a Redis or Valkey server, or gateway.%s to 1" $most (ternary "replicas" "autoscaling.maxReplicas" (eq $gateway.autoscaling.mode "off"))) -}}
{{- else -}}
{}
{{- end -}}
{{- end -}}
