{{- define "pando.modelReference" -}}
{{- $model := .Values.model -}}
{{- if eq $model.source "bundled" -}}smollm2-135m-instruct
{{- else if eq $model.source "path" -}}/models/{{ $model.path | trimPrefix "/" }}
{{- else if eq $model.source "hub" -}}/models/{{ $model.hub.repository | replace "/" "--" }}
{{- else -}}/models/{{ base (trimSuffix "/" $model.s3.uri) }}
{{- end -}}
{{- end -}}

{{- define "pando.modelVolumes" -}}
{{- $volume := .Values.model.volume -}}
{{- if ne .Values.model.source "bundled" }}
- name: model
  {{- if or $volume.existingClaim $volume.create }}
  persistentVolumeClaim:
    claimName: {{ default (printf "%s-model" (include "pando.fullname" .)) $volume.existingClaim }}
  {{- else if eq .Values.model.source "path" }}
  {{- fail "model.source path needs model.volume.existingClaim, or model.volume.create" }}
  {{- else }}
  emptyDir: {sizeLimit: {{ $volume.sizeLimit | quote }}}
  {{- end }}
{{- end }}
{{- end -}}

{{/* The container that downloads the model; takes {root, isWhole}. Tokenizer and detokenizer need no weights. */}}
{{- define "pando.modelDownload" -}}
{{- $model := .root.Values.model -}}
{{- $target := include "pando.modelReference" .root -}}
{{- if eq $model.source "hub" }}
- name: model
  image: {{ include "pando.image" (dict "root" .root "image" .root.Values.image.services) }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  command: [python, -c]
  args:
    - |
      import sys
      from huggingface_hub import snapshot_download
      repository, revision, target, *left_out = sys.argv[1:]
      snapshot_download(repository, revision=revision, local_dir=target, ignore_patterns=left_out)
    - {{ required "model.source hub needs model.hub.repository" $model.hub.repository | quote }}
    - {{ $model.hub.revision | quote }}
    - {{ $target | quote }}
    - "*.bin"
    - "*.pth"
    - "original/*"
    {{- if not .isWhole }}
    - "*.safetensors"
    {{- end }}
  env:
    - {name: HOME, value: /tmp}
    {{- with $model.hub.endpoint }}
    - {name: HF_ENDPOINT, value: {{ . | quote }}}
    {{- end }}
    {{- with $model.hub.tokenSecret }}
    - name: HF_TOKEN
      valueFrom: {secretKeyRef: {name: {{ . | quote }}, key: token}}
    {{- end }}
  {{- include "pando.downloadRest" .root | nindent 2 }}
{{- else if eq $model.source "s3" }}
- name: model
  image: {{ $model.s3.image | quote }}
  args:
    - s3
    - sync
    - {{ required "model.source s3 needs model.s3.uri" $model.s3.uri | quote }}
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
