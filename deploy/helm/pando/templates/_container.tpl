{{/* The container of a service; takes {root, name}, `group` of schedulers, and `pod` if it is one of several in a pod. */}}
{{- define "pando.container" -}}
{{- $root := .root -}}
{{- $values := index $root.Values .name -}}
{{- $facts := index (include "pando.pipeline" $root | fromYaml) .name -}}
{{- $isEncoder := eq .name "encoder" -}}
{{- $isWorker := or $isEncoder (eq .name "worker") -}}
{{- $ranks := include "pando.processes" . | int -}}
{{- $needsModel := or $isWorker (has .name (list "tokenizer" "detokenizer")) -}}
{{- $image := $root.Values.image.services -}}
{{- if $isWorker }}{{ $image = ternary $root.Values.image.workerCuda $root.Values.image.workerCpu (eq $values.device "cuda") }}{{ end -}}
{{- $isSidecar := and $isWorker (hasKey . "pod") -}}
{{- /* The kubelet has no certificate for a gateway that requires client certificates. */}}
{{- $hasProbePort := and (eq .name "gateway") (ne $root.Values.gateway.clientAuthoritySecret "") -}}
- name: {{ .name }}
  {{- if $isSidecar }}
  # Starts before the scheduler, and ends after it has drained.
  restartPolicy: Always
  {{- end }}
  image: {{ include "pando.image" (dict "root" $root "image" $image) }}
  imagePullPolicy: {{ $root.Values.image.pullPolicy }}
  {{- if gt $ranks 1 }}
  # One process per {{ ternary "encoder" "rank" $isEncoder }}; when one ends, all end, and the container restarts.
  command: [python, -m, deploy.ranks, --ranks, {{ $ranks | quote }}, --config, /etc/pando/pando.toml]
  {{- else }}
  command: [python, -m, {{ $facts.module }}, --config, /etc/pando/pando.toml]
  {{- end }}
  env:
    - {name: HOME, value: /tmp}
    {{- if and $root.Values.tls.enabled $root.Values.tls.tokenSecret }}
    - name: PANDO_RPC__TOKEN
      valueFrom: {secretKeyRef: {name: {{ $root.Values.tls.tokenSecret | quote }}, key: token}}
    {{- end }}
    {{- if eq .name "scheduler" }}
    {{- include "pando.groupVariables" . | trim | nindent 4 }}
    {{- end }}
    {{- if and $needsModel (has (include "pando.modelSource" $root) (list "hub" "gs")) }}
    # The init container has downloaded the model.
    - {name: HF_HOME, value: /models}
    - {name: HF_HUB_OFFLINE, value: "1"}
    {{- end }}
    {{- if $isEncoder }}
    # The settings are those of workers, which use the other ports in a group's pod.
    - {name: PANDO_WORKER__ADDRESS, value: {{ printf "%s:%d" $root.Values.listenHost (int $facts.port) | quote }}}
    - {name: PANDO_WORKER__METRICS_PORT, value: {{ $facts.metrics | quote }}}
    {{- end }}
    {{- if $isWorker }}
    - name: OMP_NUM_THREADS
      valueFrom: {resourceFieldRef: {resource: requests.cpu}}
    {{- end }}
    {{- if and $isSidecar $root.Values.tls.enabled }}
    # The other port is used by the scheduler in the same pod.
    - {name: PANDO_RPC__PROBE_PORT, value: {{ include "pando.probePort" . | quote }}}
    {{- else if $hasProbePort }}
    - {name: PANDO_RPC__PROBE_PORT, value: {{ include "pando.probePort" . | quote }}}
    {{- end }}
    {{- with $values.extraEnv }}{{ toYaml . | nindent 4 }}{{ end }}
  ports:
    {{- range $rank := until $ranks }}
    - name: {{ include "pando.portName" (merge (dict "purpose" "grpc" "rank" $rank) $) }}
      containerPort: {{ add $facts.port $rank }}
    {{- end }}
    {{- range $rank := until $ranks }}
    - name: {{ include "pando.portName" (merge (dict "purpose" "metrics" "rank" $rank) $) }}
      containerPort: {{ add $facts.metrics $rank }}
    {{- end }}
    {{- if $hasProbePort }}
    - name: probes
      containerPort: {{ include "pando.probePort" . }}
    {{- end }}
  {{- include "pando.probes" (merge (dict "facts" $facts) .) | nindent 2 }}
  {{- if not $isSidecar }}
  lifecycle:
    preStop:
      sleep: {seconds: {{ $root.Values.preStopSeconds }}}
  {{- end }}
  securityContext:
    {{- mergeOverwrite (deepCopy $root.Values.securityContext) $values.securityContext | toYaml | nindent 4 }}
  resources:
    {{- include "pando.resources" . | nindent 4 }}
  volumeMounts:
    - {name: {{ ternary "worker" .name $isWorker }}-settings, mountPath: /etc/pando/pando.toml, subPath: pando.toml, readOnly: true}
    - {name: tmp, mountPath: /tmp}
    {{- if $isWorker }}
    - {name: shared-memory, mountPath: /dev/shm}
    {{- if eq $values.device "cuda" }}
    - {name: kernels, mountPath: /cache}
    {{- end }}
    {{- end }}
    {{- if and (eq .name "gateway") $root.Values.apiKeys.existingSecret }}
    - {name: keys, mountPath: /etc/pando/keys, readOnly: true}
    {{- end }}
    {{- if and (eq .name "gateway") $root.Values.gateway.state.existingSecret }}
    - {name: state, mountPath: /etc/pando/state, readOnly: true}
    {{- end }}
    {{- if and (eq .name "gateway") $root.Values.gateway.state.signingSecret }}
    - {name: state-signing, mountPath: /etc/pando/state-signing, readOnly: true}
    {{- end }}
    {{- if and (has .name (list "tokenizer" "scheduler")) $root.Values.fleet.existingSecret }}
    - {name: fleet, mountPath: /etc/pando/fleet, readOnly: true}
    {{- end }}
    {{- if and (eq .name "gateway") $values.certificateSecret }}
    - {name: https, mountPath: /etc/pando/https, readOnly: true}
    {{- end }}
    {{- if and (eq .name "gateway") $values.clientAuthoritySecret }}
    - {name: clients, mountPath: /etc/pando/clients, readOnly: true}
    {{- end }}
    {{- if and (has .name (list "gateway" "scheduler")) $root.Values.limits }}
    # As a directory, because a single mounted file is not updated with its ConfigMap.
    - {name: limits, mountPath: /etc/pando/limits, readOnly: true}
    {{- end }}
    {{- if and (has .name (list "gateway" "scheduler")) $root.Values.adminToken.existingSecret }}
    - {name: admin, mountPath: /etc/pando/admin, readOnly: true}
    {{- end }}
    {{- if $root.Values.tls.enabled }}
    - {name: {{ ternary "worker-tls" "tls" $isSidecar }}, mountPath: /etc/pando/tls, readOnly: true}
    {{- end }}
    {{- if eq .name "scheduler" }}
    {{- if include "pando.keyringClaim" $root }}
    - {name: keyring, mountPath: /var/lib/pando/keyring}
    {{- end }}
    {{- if $root.Values.keyring.existingSecret }}
    - {name: keyring-secret, mountPath: /etc/pando/keyring, readOnly: true}
    {{- end }}
    {{- end }}
    {{- if and (has .name (list "gateway" "scheduler")) (include "pando.auditClaim" $root) }}
    - {name: audit, mountPath: /var/lib/pando/audit}
    {{- end }}
    {{- if and (has .name (list "scheduler" "worker")) (include "pando.turnsClaim" $root) }}
    - {name: turns, mountPath: /var/lib/pando/turns}
    {{- end }}
    {{- if and (eq .name "gateway") (include "pando.responsesClaim" $root) }}
    - {name: responses, mountPath: /var/lib/pando/responses}
    {{- end }}
    {{- with $values.extraVolumeMounts }}{{ toYaml . | nindent 4 }}{{ end }}
    {{- if and $needsModel (ne (include "pando.modelSource" $root) "bundled") }}
    - {name: model, mountPath: /models, readOnly: true}
    {{- end }}
{{- end -}}

{{/* The port that serves health in plaintext, if the services use TLS. */}}
{{- define "pando.probePort" -}}
{{- ternary (get (dict "worker" 9210 "encoder" 9230) .name) 9200 (and (hasKey . "pod") (ne .name "scheduler")) -}}
{{- end -}}

{{/* A port's name; takes {purpose, rank} and the container's own parameters. Names must be unique within a pod. */}}
{{- define "pando.portName" -}}
{{- if and (eq .name "gateway") (eq .purpose "grpc") -}}http
{{- else if and (eq .name "worker") (hasKey . "pod") -}}{{ ternary "rank" "rank-metrics" (eq .purpose "grpc") }}-{{ .rank }}
{{- else if and (eq .name "encoder") (hasKey . "pod") -}}{{ ternary "encoder" "enc-metrics" (eq .purpose "grpc") }}-{{ .rank }}
{{- else -}}{{ .purpose }}{{ with .rank }}-{{ . }}{{ end }}
{{- end -}}
{{- end -}}

{{/* Health "" is SERVING while the event loop runs, the service's full name while a request would be served. */}}
{{- define "pando.probes" -}}
{{- /* The kubelet's gRPC probes do not support TLS. */}}
{{- $port := ternary (include "pando.probePort" .) (toString .facts.port) .root.Values.tls.enabled -}}
{{- $isPlain := or (not .root.Values.gateway.certificateSecret) .root.Values.gateway.clientAuthoritySecret -}}
{{- $scheme := ternary "HTTP" "HTTPS" (not (not $isPlain)) -}}
{{- $http := ternary "probes" "http" (ne .root.Values.gateway.clientAuthoritySecret "") -}}
{{- if eq .name "gateway" -}}
startupProbe:
  httpGet: {path: /health, port: {{ $http }}, scheme: {{ $scheme }}}
  periodSeconds: 2
  failureThreshold: 60
livenessProbe:
  httpGet: {path: /health, port: {{ $http }}, scheme: {{ $scheme }}}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
readinessProbe:
  httpGet: {path: /ready, port: {{ $http }}, scheme: {{ $scheme }}}
  periodSeconds: 5
  timeoutSeconds: 3
{{- else -}}
startupProbe:
  # The scheduler serves once the workers have loaded their weights; the others serve at once.
  grpc: {port: {{ $port }}, service: {{ ternary .facts.health "" (eq .name "scheduler") | quote }}}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: {{ ternary (div (add .root.Values.model.loadSeconds 4) 5) 60 (eq .name "scheduler") }}
livenessProbe:
  grpc: {port: {{ $port }}, service: ""}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
{{- /* A group is ready without its encoders. */}}
{{- if not (and (eq .name "encoder") (hasKey . "pod")) }}
readinessProbe:
  grpc: {port: {{ $port }}, service: {{ .facts.health }}}
  periodSeconds: 5
  timeoutSeconds: 3
{{- end }}
{{- end -}}
{{- end -}}

{{/* The resources in the values, and one GPU per rank or encoder. */}}
{{- define "pando.resources" -}}
{{- $values := index .root.Values .name -}}
{{- $resources := deepCopy $values.resources -}}
{{- if and (has .name (list "worker" "encoder")) (eq $values.device "cuda") -}}
{{- $gpus := dict $values.gpuResource (include "pando.processes" .) -}}
{{- $_ := set $resources "limits" (merge $gpus ($resources.limits | default dict)) -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}
