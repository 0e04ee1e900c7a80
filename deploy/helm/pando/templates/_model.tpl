{{/* Where the model comes from: bundled, path (on the volume), hub, s3 or gs. */}}
{{- define "pando.modelSource" -}}
{{- $reference := .Values.model.reference -}}
{{- if hasPrefix "s3://" $reference -}}s3
{{- else if hasPrefix "gs://" $reference -}}gs
{{- else if hasPrefix "/" $reference -}}path
{{- else if has $reference (list "smollm2-135m-instruct" "all-minilm-l6-v2") -}}bundled
{{- else -}}hub
{{- end -}}
{{- end -}}

{{/* The reference that the services resolve: a model on a hub or in gs is in the cache of its volume. */}}
{{- define "pando.modelReference" -}}
{{- $reference := .Values.model.reference -}}
{{- if eq (include "pando.modelSource" .) "s3" -}}/models/{{ base (trimSuffix "/" $reference) }}
{{- else -}}{{ $reference }}
{{- end -}}
{{- end -}}

{{/* The name by which clients request the model, as the services derive it from the reference. */}}
{{- define "pando.servedName" -}}
{{- $reference := include "pando.modelReference" . -}}
{{- $source := include "pando.modelSource" . -}}
{{- $name := base $reference -}}
{{- if eq "hub" $source }}{{ $name = regexReplaceAll "[@:].*$" $reference "" }}{{ end -}}
{{- if eq "gs" $source }}{{ $name = regexReplaceAll ":.*$" (base $reference) "" }}{{ end -}}
{{- .Values.model.servedName | default $name -}}
{{- end -}}

{{- define "pando.modelVolumes" -}}
{{- $volume := .Values.model.volume -}}
{{- $source := include "pando.modelSource" . -}}
{{- if ne $source "bundled" }}
- name: model
  {{- if or $volume.existingClaim $volume.create }}
  persistentVolumeClaim:
    claimName: {{ default (printf "%s-model" (include "pando.fullname" .)) $volume.existingClaim }}
  {{- else if eq $source "path" }}
  {{- fail "a path in model.reference needs model.volume.existingClaim, or model.volume.create" }}
  {{- else }}
  emptyDir: {sizeLimit: {{ $volume.sizeLimit | quote }}}
  {{- end }}
{{- end }}
{{- if and (eq $source "gs") .Values.model.gs.credentialsSecret }}
- name: model-credentials
  secret: {secretName: {{ .Values.model.gs.credentialsSecret | quote }}}
{{- end }}
{{- end -}}

{{/* "true" if pods with ranks of a group have some stages of its pipeline only, of which they download the files. A classification head takes tensors of all. */}}
{{- define "pando.hasParts" -}}
{{- $isSpread := gt (include "pando.workerPods" . | int) 1 -}}
{{- if and (gt (int .Values.worker.pipelineParallel) 1) $isSpread (not (dig "model" "classifier_from_token" list .Values.settings)) }}true{{ end -}}
{{- end -}}

{{/* The container that downloads the model; takes {root, isWhole}. Tokenizer and detokenizer need no weights. */}}
{{- define "pando.modelDownload" -}}
{{- $model := .root.Values.model -}}
{{- $target := include "pando.modelReference" .root -}}
{{- $source := include "pando.modelSource" .root -}}
{{- if has $source (list "hub" "gs") }}
- name: model
  {{- $worker := .root.Values.worker }}
  {{- $isPart := and .isWhole (eq "true" (include "pando.hasParts" .root)) (eq $source "hub") }}
  {{- $workerImage := ternary .root.Values.image.workerCuda .root.Values.image.workerCpu (eq $worker.device "cuda") }}
  image: {{ include "pando.image" (dict "root" .root "image" (ternary $workerImage .root.Values.image.services $isPart)) }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  # Pods that share the volume share the download.
  command: [python, -m, {{ ternary "services.worker.pull" "common.models.pull" $isPart }}]
  args:
    - {{ $target | quote }}
    {{- if not .isWhole }}
    - --no-weights
    {{- else if $isPart }}
    - --tensor-parallel={{ $worker.tensorParallel }}
    - --pipeline-parallel={{ $worker.pipelineParallel }}
    - --ranks-per-pod={{ include "pando.ranksPerPod" .root }}
    - --pod=$(POD_INDEX)
    {{- end }}
  env:
    {{- if $isPart }}
    - name: POD_INDEX
      valueFrom: {fieldRef: {fieldPath: {{ include "pando.podIndex" .root }}}}
    {{- end }}
    - {name: HOME, value: /tmp}
    - {name: HF_HOME, value: /models}
    {{- if eq $source "gs" }}
    {{- if $model.gs.credentialsSecret }}
    - {name: GOOGLE_APPLICATION_CREDENTIALS, value: /credentials/key.json}
    {{- end }}
    {{- with $model.gs.endpoint }}
    - {name: STORAGE_EMULATOR_HOST, value: {{ . | quote }}}
    {{- end }}
    {{- else }}
    {{- with $model.hub.endpoint }}
    - {name: HF_ENDPOINT, value: {{ . | quote }}}
    {{- end }}
    {{- with $model.hub.tokenSecret }}
    - name: HF_TOKEN
      valueFrom: {secretKeyRef: {name: {{ . | quote }}, key: token}}
    {{- end }}
    {{- end }}
  {{- include "pando.downloadRest" .root | nindent 2 }}
  {{- if and (eq $source "gs") $model.gs.credentialsSecret }}
    - {name: model-credentials, mountPath: /credentials, readOnly: true}
  {{- end }}
{{- else if eq $source "s3" }}
- name: model
  image: {{ $model.s3.image | quote }}
  args:
    - s3
    - sync
    - {{ $model.reference | quote }}
    - {{ $target | quote }}
    - --only-show-errors
    {{- if not .isWhole }}
    - --exclude=*.safetensors
    {{- end }}
    {{- with $model.s3.endpoint }}
    - --endpoint-url={{ . }}
    {{- end }}
  env:
    - {name: HOME, value: /tmp}
    {{- with $model.s3.region }}
    - {name: AWS_REGION, value: {{ . | quote }}}
    {{- end }}
  {{- with $model.s3.credentialsSecret }}
  envFrom:
    - secretRef: {name: {{ . | quote }}}
  {{- end }}
  {{- include "pando.downloadRest" .root | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "pando.downloadRest" -}}
securityContext:
  {{- toYaml .Values.securityContext | nindent 2 }}
resources:
  requests: {cpu: 200m, memory: 512Mi}
  limits: {memory: 2Gi}
volumeMounts:
  - {name: model, mountPath: /models}
  - {name: tmp, mountPath: /tmp}
{{- end -}}
