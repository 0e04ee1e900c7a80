{{/* The services: ports, modules and health names, for pods, probes and policies; drain times that are constants. */}}
{{- define "pando.pipeline" -}}

gateway: {module: gateway, port: 8000, metrics: 9095}
tokenizer: {module: services.tokenizer, port: 50051, metrics: 9091, health: pando.v1.Tokenizer, drain: 5}
scheduler: {module: services.scheduler, port: 50052, metrics: 9092, health: pando.v1.Scheduler}
worker: {module: services.worker, port: 50053, metrics: 9093, health: pando.v1.Worker}
detokenizer: {module: services.detokenizer, port: 50054, metrics: 9094, health: pando.v1.Detokenizer, drain: 15}
{{- end -}}

{{- define "pando.ranksPerPod" -}}
{{- $worker := .Values.worker -}}
{{- $ranks := $worker.ranksPerPod | default $worker.tensorParallel | int -}}
{{- if mod (int $worker.tensorParallel) $ranks -}}
{{- fail (printf "worker.tensorParallel (%d) must be a multiple of worker.ranksPerPod (%d)" (int $worker.tensorParallel) $ranks) -}}
{{- end -}}
{{- $ranks -}}
{{- end -}}

{{- define "pando.workerPods" -}}
{{- div (int .Values.worker.tensorParallel) (include "pando.ranksPerPod" . | int) -}}
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

{{/* The settings of all services as a mapping; the chart's addresses take precedence over `settings`. Workers: pando.groupVariables. */}}
{{- define "pando.settings" -}}
{{- $pipeline := include "pando.pipeline" . | fromYaml -}}
{{- $name := include "pando.fullname" . -}}
{{- $interface := .Values.listenHost | trimPrefix "[" | trimSuffix "]" -}}
{{- $own := dict "model" (dict "reference" (include "pando.modelReference" .)) "log" (dict "format" "json") "metrics" (dict "host" $interface) -}}
{{- with .Values.model.servedName }}{{ $_ := set $own.model "served_name" . }}{{ end -}}
{{- range $service, $facts := omit $pipeline "gateway" -}}
{{- $listen := printf "%s:%d" $.Values.listenHost (int $facts.port) -}}
{{- $_ := set $own $service (dict "address" $listen "metrics_port" (int $facts.metrics)) -}}
{{- end -}}
{{- $peer := dict -}}
{{- range $service, $facts := $pipeline }}{{ $_ := set $peer $service (printf "%s-%s:%d" $name $service (int $facts.port)) }}{{ end -}}
{{- $gateway := dict "host" $interface "port" (int $pipeline.gateway.port) "metrics_port" (int $pipeline.gateway.metrics) -}}
{{- $_ := merge $gateway (dict "tokenizer" $peer.tokenizer "detokenizer" $peer.detokenizer "drain_s" (int .Values.gateway.drainSeconds)) -}}
{{- /* Host names of requests that a service mesh's sidecar may forward over loopback. */}}
{{- $service := printf "%s-gateway" $name -}}
{{- $namespaced := printf "%s.%s" $service .Release.Namespace -}}
{{- $hosts := list $service $namespaced (printf "%s.svc" $namespaced) (printf "%s.svc.cluster.local" $namespaced) -}}
{{- if .Values.ingress.enabled }}{{ $hosts = concat $hosts .Values.ingress.hosts }}{{ end -}}
{{- if .Values.httpRoute.enabled }}{{ $hosts = concat $hosts .Values.httpRoute.hostnames }}{{ end -}}
{{- $names := dig "gateway" "allowed_hosts" list .Values.settings -}}
{{- range $hosts }}{{ if not (hasPrefix "*" .) }}{{ $names = append $names . }}{{ end }}{{ end -}}
{{- $_ := set $gateway "allowed_hosts" ($names | uniq) -}}
{{- if .Values.apiKeys.existingSecret }}{{ $_ := set $gateway "keys_file" "/etc/pando/keys/keys.toml" }}{{ end -}}
{{- if .Values.limits -}}
{{- $_ := set $own "limits" (dict "file" "/etc/pando/limits/limits.toml") -}}
{{- end -}}
{{- $_ := set $own "gateway" $gateway -}}
{{- $schedulers := include "pando.schedulers" . | fromJsonArray -}}
{{- range $asking := list $own.tokenizer $own.gateway }}{{ $_ := set $asking "schedulers" $schedulers }}{{ end -}}
{{- $_ := merge $own.scheduler (dict "detokenizer" $peer.detokenizer "drain_s" (int .Values.scheduler.drainSeconds)) -}}
{{- if .Values.adminToken.existingSecret -}}
{{- $_ := set $own.scheduler "admin_token" "file:/etc/pando/admin/token" -}}
{{- end -}}
{{- if .Values.gateway.certificateSecret }}{{ $_ := set $own.gateway "tls" (dict "certificate" "/etc/pando/https/tls.crt" "key" "/etc/pando/https/tls.key") }}{{ end -}}
{{- if .Values.gateway.clientAuthoritySecret -}}
{{- $_ := required "gateway.clientAuthoritySecret needs gateway.certificateSecret" .Values.gateway.certificateSecret -}}
{{- $_ := set $own.gateway.tls "client_authority" "/etc/pando/clients/ca.crt" -}}
{{- end -}}
{{- $_ := merge $own.gateway (include "pando.state" . | fromJson) -}}
{{- $rpc := dict "plaintext" true -}}
{{- if .Values.tls.enabled -}}
{{- $rpc = dict "certificate" "/etc/pando/tls/tls.crt" "key" "/etc/pando/tls/tls.key" "authority" "/etc/pando/tls/ca.crt" "probe_port" 9200 -}}
{{- $_ := set $rpc "trust_domain" (include "pando.trustDomain" .) -}}
{{- with .Values.tls.peerNames }}{{ $_ := set $rpc "peer_names" . }}{{ end -}}
{{- end -}}
{{- $_ := set $own "rpc" $rpc -}}
{{- $_ := set $own.worker "device" .Values.worker.device -}}
{{- mergeOverwrite (deepCopy .Values.settings) $own | toJson -}}
{{- end -}}
