{{- define "pando.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* The labels that select all of the release. */}}
{{- define "pando.releaseSelector" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{/* The labels that select a component; takes {root, name}, and for schedulers and workers their `group`. The root of a set of groups has a role. */}}
{{- define "pando.selector" -}}
{{ include "pando.releaseSelector" .root }}
app.kubernetes.io/component: {{ .name }}
{{- with .root.Role }}
pando/role: {{ . }}
{{- end }}
{{- if hasKey . "group" }}
pando/group: {{ .group | quote }}
{{- end }}
{{- end -}}

{{/* The label of pods with a scheduler, whatever their component, where groups have roles. */}}
{{- define "pando.schedulerLabel" -}}
pando/scheduler: "true"
{{- end -}}

{{- define "pando.labels" -}}
{{ include "pando.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: pando
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end -}}

{{/* The name of a component's objects; those of the first group are named as if it were the only one. */}}
{{- define "pando.name" -}}
{{ include "pando.fullname" .root }}{{ with .root.Role }}-{{ . }}{{ end }}-{{ .name }}{{ with .group }}-group-{{ . }}{{ end }}
{{- end -}}

{{- define "pando.metadata" -}}
name: {{ include "pando.name" . }}
labels:
  {{- include "pando.labels" . | nindent 2 }}
{{- end -}}

{{/* Metadata of an object with pods: also the labels in the values, by which queues such as Kueue's admit it. */}}
{{- define "pando.workloadMetadata" -}}
{{- include "pando.metadata" . }}
  {{- with (.values | default (index .root.Values .name)).labels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{/* The Secret with a service's certificate; takes {root, service}. */}}
{{- define "pando.tlsSecret" -}}
{{- get .root.Values.tls.existingSecrets .service | default (printf "%s-%s-tls" (include "pando.fullname" .root) .service) -}}
{{- end -}}

{{- define "pando.trustDomain" -}}
{{- .Values.tls.trustDomain | default .Release.Namespace -}}
{{- end -}}

{{- define "pando.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{ default (include "pando.fullname" .) .Values.serviceAccount.name }}
{{- else -}}
{{ default "default" .Values.serviceAccount.name }}
{{- end -}}
{{- end -}}

{{/* An image by its name in values; takes {root, image}. */}}
{{- define "pando.image" -}}
{{- $image := .root.Values.image -}}
{{- with $image.registry }}{{ trimSuffix "/" . }}/{{ end -}}
{{ .image }}:{{ default .root.Chart.AppVersion $image.tag }}
{{- end -}}
