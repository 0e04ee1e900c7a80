{{/* The sections of `settings` that each service reads; others would only restart it without need. */}}
{{- define "pando.sections" -}}

gateway: [log, rpc, metrics, tracing, limits, audit, gateway]
tokenizer: [log, rpc, metrics, tracing, model, fleet, tokenizer]
scheduler: [log, rpc, metrics, tracing, model, limits, audit, fleet, scheduler]
worker: [log, rpc, metrics, tracing, model, worker]
detokenizer: [log, rpc, metrics, tracing, model, detokenizer]
{{- end -}}

{{/* The services whose settings the pods of a component read. */}}
{{- define "pando.services" -}}
{{- get (dict "group" (list "scheduler" "worker") "encoder" (list "worker")) . | default (list .) | toJson -}}
{{- end -}}

{{/* The settings file of one service; takes {root, service}. A service is restarted if its own file changes. */}}
{{- define "pando.settingsFile" -}}
{{- $all := include "pando.settings" .root | fromJson -}}
{{- $own := dict -}}
{{- range $section := index (include "pando.sections" .root | fromYaml) .service -}}
{{- if hasKey $all $section }}{{ $_ := set $own $section (index $all $section) }}{{ end -}}
{{- end -}}
{{- if and (ne .service "tokenizer") (hasKey ($own.model | default dict) "chat_template") -}}
{{- $_ := set $own "model" (omit $own.model "chat_template") -}}
{{- end -}}
{{- if and (eq .service "gateway") (hasKey $all.scheduler "admin_token") -}}
{{- $_ := set $own "scheduler" (pick $all.scheduler "admin_token") -}}
{{- else if eq .service "worker" -}}
{{- /* Workers that are told to end serve as long as their scheduler drains. */}}
{{- $_ := set $own "scheduler" (pick $all.scheduler "drain_s" "device_turns") -}}
{{- end -}}
{{- $own | toToml -}}
{{- end -}}

{{/* The settings of all services as a mapping; the chart's addresses take precedence over `settings`. Workers: pando.groupVariables. */}}
{{- define "pando.settings" -}}
{{- $pipeline := include "pando.pipeline" . | fromYaml -}}
{{- $name := include "pando.fullname" . -}}
{{- $interface := .Values.listenHost | trimPrefix "[" | trimSuffix "]" -}}
{{- $own := dict "model" (dict "reference" (include "pando.modelReference" .)) "log" (dict "format" "json") "metrics" (dict "host" $interface) -}}
{{- with .Values.model.servedName }}{{ $_ := set $own.model "served_name" . }}{{ end -}}
{{- with .Values.model.chatTemplate }}{{ $_ := set $own.model "chat_template" . }}{{ end -}}
{{- range $service, $facts := omit $pipeline "gateway" "encoder" -}}
{{- $listen := printf "%s:%d" $.Values.listenHost (int $facts.port) -}}
{{- $_ := set $own $service (dict "address" $listen "metrics_port" (int $facts.metrics)) -}}
{{- end -}}
{{- if gt (int .Values.worker.pipelineParallel) 1 -}}
{{- $_ := set $own.scheduler "pipeline_parallel" (int .Values.worker.pipelineParallel) -}}
{{- end -}}
{{- with .Role }}{{ $_ := set $own.scheduler "role" . }}{{ end -}}
{{- if .Values.worker.expertParallel -}}
{{- $_ := set $own.scheduler "expert_parallel" true -}}
{{- end -}}
{{- if include "pando.sharesExperts" . -}}
{{- $groups := include "pando.name" (dict "root" . "name" "group") -}}
{{- $meeting := printf "%s-0.%s.%s.svc:29556" $groups $groups .Release.Namespace -}}
{{- $_ := set $own.scheduler "data_parallel" (dict "size" (int .Values.groups.dataParallel) "rendezvous" $meeting) -}}
{{- end -}}
{{- $peer := dict -}}
{{- range $service, $facts := $pipeline }}{{ $_ := set $peer $service (list (printf "dns:%s-%ss:%d" $name $service (int $facts.port))) }}{{ end -}}
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
{{- if .Values.fleet.existingSecret }}{{ $_ := set $own "fleet" (dict "state" "file:/etc/pando/fleet/url" "secret" "file:/etc/pando/fleet/secret") }}{{ end -}}
{{- $storage := dict -}}
{{- if include "pando.keyringClaim" . }}{{ $_ := set $storage "keyring" "/var/lib/pando/keyring/keyring.db" }}{{ end -}}
{{- if .Values.keyring.existingSecret }}{{ $_ := set $storage "secret" "file:/etc/pando/keyring/secret" }}{{ end -}}
{{- if $storage }}{{ $_ := set $own.scheduler "storage" $storage }}{{ end -}}
{{- if include "pando.responsesClaim" . }}{{ $_ := set $own.gateway "responses" (dict "file" "/var/lib/pando/responses/responses.db") }}{{ $_ := set $own.gateway "batches" (dict "file" "/var/lib/pando/responses/batches.db") }}{{ end -}}
{{- if include "pando.auditClaim" . }}{{ $_ := set $own "audit" (dict "directory" "/var/lib/pando/audit") }}{{ end -}}
{{- if include "pando.turnsClaim" . }}{{ $_ := set $own.scheduler "device_turns" (dict "enabled" true "directory" "/var/lib/pando/turns") }}{{ end -}}
{{- $_ := set $own.worker "device" .Values.worker.device -}}
{{- $given := deepCopy .Values.settings -}}
{{- if eq .Values.worker.device "cuda" -}}
{{- /* As `pando up` on GPUs, unless the values say otherwise. */}}
{{- $_ := set $given "scheduler" (merge (get $given "scheduler" | default dict) (dict "max_rows" 256 "max_step_tokens" 4096)) -}}
{{- end -}}
{{- mergeOverwrite $given $own | toJson -}}
{{- end -}}
