{{- define "pando.container" -}}
{{- $root := .root -}}
{{- $values := index $root.Values .name -}}
{{- $facts := index (include "pando.ring" $root | fromYaml) .name -}}
{{- $isWorker := eq .name "worker" -}}
{{- $ranks := ternary (include "pando.ranksPerPod" $root | int) 1 $isWorker -}}
{{- $image := $root.Values.image.services -}}
{{- if $isWorker }}{{ $image = ternary $root.Values.image.workerCuda $root.Values.image.workerCpu (eq $values.device "cuda") }}{{ end -}}
- name: {{ .name }}
  image: {{ include "pando.image" (dict "root" $root "image" $image) }}
  imagePullPolicy: {{ $root.Values.image.pullPolicy }}
  {{- if gt $ranks 1 }}
  # One process per rank; when one ends, all do, and the container starts anew.
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
    {{- if $isWorker }}
    - name: OMP_NUM_THREADS
      valueFrom: {resourceFieldRef: {resource: requests.cpu}}
    {{- end }}
    {{- with $values.extraEnv }}{{ toYaml . | nindent 4 }}{{ end }}
  ports:
    {{- range $rank := until $ranks }}
    - name: {{ ternary "http" (ternary "grpc" (printf "grpc-%d" $rank) (eq $rank 0)) (eq $.name "gateway") }}
      containerPort: {{ add $facts.port $rank }}
    {{- end }}
    {{- if ne .name "gateway" }}
    {{- range $rank := until $ranks }}
    - name: {{ ternary "metrics" (printf "metrics-%d" $rank) (eq $rank 0) }}
      containerPort: {{ add $facts.metrics $rank }}
    {{- end }}
    {{- end }}
  {{- include "pando.probes" (merge (dict "facts" $facts) .) | nindent 2 }}
  lifecycle:
    preStop:
      sleep: {seconds: {{ $root.Values.preStopSeconds }}}
  securityContext:
    {{- toYaml $root.Values.securityContext | nindent 4 }}
  resources:
    {{- include "pando.resources" . | nindent 4 }}
  volumeMounts:
    - {name: settings, mountPath: /etc/pando/pando.toml, subPath: pando.toml, readOnly: true}
    - {name: tmp, mountPath: /tmp}
    {{- if $isWorker }}
    - {name: shared-memory, mountPath: /dev/shm}
    {{- end }}
    {{- if and (eq .name "gateway") $root.Values.apiKeys.existingSecret }}
    - {name: keys, mountPath: /etc/pando/keys, readOnly: true}
    {{- end }}
    {{- if and (eq .name "gateway") $values.certificateSecret }}
    - {name: https, mountPath: /etc/pando/https, readOnly: true}
    {{- end }}
    {{- if and (eq .name "scheduler") $root.Values.adminToken.existingSecret }}
    - {name: admin, mountPath: /etc/pando/admin, readOnly: true}
    {{- end }}
    {{- if $root.Values.tls.enabled }}
    - {name: tls, mountPath: /etc/pando/tls, readOnly: true}
    {{- end }}
    {{- if and (has .name (list "tokenizer" "detokenizer" "worker")) (ne $root.Values.model.source "bundled") }}
    - {name: model, mountPath: /models, readOnly: true}
    {{- end }}
{{- end -}}

{{/* Health "" says that the loop turns, the service's full name that a request would be served now. */}}
{{- define "pando.probes" -}}
{{- /* The kubelet's gRPC probes speak no TLS. */}}
{{- $port := ternary 9200 .facts.port .root.Values.tls.enabled -}}
{{- $scheme := ternary "HTTPS" "HTTP" (ne .root.Values.gateway.certificateSecret "") -}}
{{- if eq .name "gateway" -}}
startupProbe:
  httpGet: {path: /health, port: http, scheme: {{ $scheme }}}
  periodSeconds: 2
  failureThreshold: 60
livenessProbe:
  httpGet: {path: /health, port: http, scheme: {{ $scheme }}}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
readinessProbe:
  httpGet: {path: /ready, port: http, scheme: {{ $scheme }}}
  periodSeconds: 5
  timeoutSeconds: 3
{{- else -}}
startupProbe:
  # The scheduler serves once the workers have loaded their weights; the others are there at once.
  grpc: {port: {{ $port }}, service: {{ ternary .facts.health "" (eq .name "scheduler") | quote }}}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: {{ ternary (div (add .root.Values.model.loadSeconds 4) 5) 60 (eq .name "scheduler") }}
livenessProbe:
  grpc: {port: {{ $port }}, service: ""}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
readinessProbe:
  grpc: {port: {{ $port }}, service: {{ .facts.health }}}
  periodSeconds: 5
  timeoutSeconds: 3
{{- end -}}
{{- end -}}

{{/* Values' resources, and one GPU per rank. */}}
{{- define "pando.resources" -}}
{{- $values := index .root.Values .name -}}
{{- $resources := deepCopy $values.resources -}}
{{- if and (eq .name "worker") (eq $values.device "cuda") -}}
{{- $gpus := dict $values.gpuResource (include "pando.ranksPerPod" .root) -}}
{{- $_ := set $resources "limits" (merge $gpus ($resources.limits | default dict)) -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}
