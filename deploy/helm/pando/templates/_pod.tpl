{{/* Metadata and spec of a component's pods; takes {root, name}, `group` if it has one, `values` if they are not those of `name`. */}}
{{- define "pando.podTemplate" -}}
{{- $values := .values | default (index .root.Values .name) -}}
metadata:
  labels:
    {{- include "pando.podLabels" . | nindent 4 }}
    {{- with $values.podLabels }}{{ toYaml . | nindent 4 }}{{ end }}
  annotations:
    {{- range $service := include "pando.services" .name | fromJsonArray }}
    checksum/{{ $service }}-settings: {{ include "pando.settingsFile" (dict "root" $.root "service" $service) | sha256sum }}
    {{- end }}
    {{- with $values.podAnnotations }}{{ toYaml . | nindent 4 }}{{ end }}
spec:
  {{- include "pando.podSpec" . | nindent 2 }}
{{- end -}}

{{/* Labels of pods: not the chart's version, which would restart pods that do not change otherwise. */}}
{{- define "pando.podLabels" -}}
{{ include "pando.selector" . }}
app.kubernetes.io/version: {{ default .root.Chart.AppVersion .root.Values.image.tag | quote }}
app.kubernetes.io/part-of: pando
{{- if and .root.Role (has .name (list "group" "scheduler")) }}
{{ include "pando.schedulerLabel" . }}
{{- end }}
{{- with include "pando.turnsLabel" . }}
{{ . }}
{{- end }}
{{- end -}}

{{/* Seconds that a pod has to finish open requests; workers drain as long as their scheduler. */}}
{{- define "pando.drainSeconds" -}}
{{- $facts := index (include "pando.pipeline" .root | fromYaml) .name | default dict -}}
{{- if has .name (list "group" "worker") }}{{ .root.Values.scheduler.drainSeconds }}
{{- else }}{{ (index .root.Values .name).drainSeconds | default $facts.drain }}
{{- end -}}
{{- end -}}

{{- define "pando.podSpec" -}}
{{- $root := .root -}}
{{- $values := .values | default (index $root.Values .name) -}}
{{- $isGroup := eq .name "group" -}}
{{- $hasWorker := or $isGroup (has .name (list "worker" "encoder")) -}}
{{- $hasEncoders := and $isGroup (gt (int $root.Values.encoder.replicas) 0) -}}
{{- $isAdmin := or $isGroup (has .name (list "gateway" "scheduler")) -}}
serviceAccountName: {{ include "pando.serviceAccount" $root }}
# No service uses the Kubernetes API.
automountServiceAccountToken: false
enableServiceLinks: false
terminationGracePeriodSeconds: {{ add $root.Values.preStopSeconds (include "pando.drainSeconds" . | int) 10 }}
securityContext:
  {{- mergeOverwrite (deepCopy $root.Values.podSecurityContext) $values.podSecurityContext | toYaml | nindent 2 }}
{{- with $root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with $values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- $affinity := include "pando.affinity" . }}
{{- with $affinity }}
affinity:
  {{- . | nindent 2 }}
{{- end }}
{{- if $values.spread }}
topologySpreadConstraints:
  {{- range $topology := list "topology.kubernetes.io/zone" "kubernetes.io/hostname" }}
  - maxSkew: 1
    topologyKey: {{ $topology }}
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "pando.selector" $ | nindent 8 }}
  {{- end }}
{{- end }}
{{- if $hasWorker }}
{{- with $values.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- end }}
{{- $needsModel := or $hasWorker (has .name (list "tokenizer" "detokenizer")) }}
{{- $isFetched := and $needsModel (has (include "pando.modelSource" $root) (list "hub" "s3" "gs")) }}
{{- if or $isGroup $isFetched }}
initContainers:
  {{- if $isFetched }}
  {{- include "pando.modelDownload" (dict "root" $root "isWhole" $hasWorker) | trim | nindent 2 }}
  {{- end }}
  {{- if $isGroup }}
  {{- include "pando.container" (dict "root" $root "name" "worker" "pod" "group") | nindent 2 }}
  {{- if $hasEncoders }}
  {{- include "pando.container" (dict "root" $root "name" "encoder" "pod" "group") | nindent 2 }}
  {{- end }}
  {{- end }}
{{- end }}
containers:
  {{- include "pando.container" (ternary (dict "root" $root "name" "scheduler" "pod" "group") . $isGroup) | nindent 2 }}
volumes:
  {{- range $service := include "pando.services" .name | fromJsonArray }}
  - name: {{ $service }}-settings
    configMap: {name: {{ include "pando.name" (dict "root" $root "name" (printf "%s-settings" $service)) }}}
  {{- end }}
  - name: tmp
    emptyDir: {sizeLimit: 2Gi}
  {{- if $hasWorker }}
  - name: shared-memory
    emptyDir: {medium: Memory, sizeLimit: {{ $values.sharedMemory | quote }}}
  {{- if eq $values.device "cuda" }}
  - name: kernels
    {{- if $values.kernelCache.existingClaim }}
    persistentVolumeClaim: {claimName: {{ $values.kernelCache.existingClaim | quote }}}
    {{- else }}
    emptyDir: {sizeLimit: {{ $values.kernelCache.sizeLimit | quote }}}
    {{- end }}
  {{- end }}
  {{- end }}
  {{- if and (eq .name "gateway") $root.Values.apiKeys.existingSecret }}
  - name: keys
    secret: {secretName: {{ $root.Values.apiKeys.existingSecret | quote }}}
  {{- end }}
  {{- if and (eq .name "gateway") $root.Values.gateway.state.existingSecret }}
  - name: state
    secret: {secretName: {{ $root.Values.gateway.state.existingSecret | quote }}}
  {{- end }}
  {{- if and (eq .name "gateway") $root.Values.gateway.state.signingSecret }}
  - name: state-signing
    secret: {secretName: {{ $root.Values.gateway.state.signingSecret | quote }}}
  {{- end }}
  {{- if and (has .name (list "tokenizer" "scheduler" "group")) $root.Values.fleet.existingSecret }}
  - name: fleet
    secret: {secretName: {{ $root.Values.fleet.existingSecret | quote }}}
  {{- end }}
  {{- if and (eq .name "gateway") $values.certificateSecret }}
  - name: https
    secret: {secretName: {{ $values.certificateSecret | quote }}}
  {{- end }}
  {{- if and (eq .name "gateway") $values.clientAuthoritySecret }}
  - name: clients
    secret: {secretName: {{ $values.clientAuthoritySecret | quote }}}
  {{- end }}
  {{- if and $isAdmin $root.Values.limits }}
  - name: limits
    configMap: {name: {{ include "pando.fullname" $root }}-limits}
  {{- end }}
  {{- if and $isAdmin $root.Values.adminToken.existingSecret }}
  - name: admin
    secret: {secretName: {{ $root.Values.adminToken.existingSecret | quote }}}
  {{- end }}
  {{- if $root.Values.tls.enabled }}
  - name: tls
    secret: {secretName: {{ include "pando.tlsSecret" (dict "root" $root "service" (include "pando.services" .name | fromJsonArray | first)) }}}
  {{- if $isGroup }}
  - name: worker-tls
    secret: {secretName: {{ include "pando.tlsSecret" (dict "root" $root "service" "worker") }}}
  {{- end }}
  {{- end }}
  {{- if $needsModel }}
  {{- with include "pando.modelVolumes" $root | trim }}{{ . | nindent 2 }}{{ end }}
  {{- end }}
  {{- if or $isGroup (eq .name "scheduler") }}
  {{- with include "pando.keyringClaim" $root }}
  - name: keyring
    persistentVolumeClaim: {claimName: {{ . | quote }}}
  {{- end }}
  {{- with $root.Values.keyring.existingSecret }}
  - name: keyring-secret
    secret: {secretName: {{ . | quote }}}
  {{- end }}
  {{- end }}
  {{- if $isAdmin }}
  {{- with include "pando.auditClaim" $root }}
  - name: audit
    persistentVolumeClaim: {claimName: {{ . | quote }}}
  {{- end }}
  {{- end }}
  {{- if or $hasWorker (eq .name "scheduler") }}
  {{- with include "pando.turnsClaim" $root }}
  - name: turns
    persistentVolumeClaim: {claimName: {{ . | quote }}}
  {{- end }}
  {{- end }}
  {{- if eq .name "gateway" }}
  {{- with include "pando.responsesClaim" $root }}
  - name: responses
    persistentVolumeClaim: {claimName: {{ . | quote }}}
  {{- end }}
  {{- end }}
  {{- $extra := list }}
  {{- range $name := ternary (list "scheduler" "worker") (list .name) $isGroup }}{{ $extra = concat $extra (index $root.Values $name).extraVolumes }}{{ end }}
  {{- if $hasEncoders }}{{ $extra = concat $extra $root.Values.encoder.extraVolumes }}{{ end }}
  {{- with uniq $extra }}{{ toYaml . | nindent 2 }}{{ end }}
{{- end -}}

{{/* The affinity in the values; the pods of one group's ranks must share a node, and so must those that take turns. */}}
{{- define "pando.affinity" -}}
{{- $worker := .root.Values.worker -}}
{{- $affinity := deepCopy (.values | default (index .root.Values .name)).affinity -}}
{{- $labels := list -}}
{{- if and (eq .name "worker") (not $worker.leaderWorkerSet.enabled) (gt (include "pando.workerPods" .root | int) 1) -}}
{{- $labels = append $labels (include "pando.selector" . | fromYaml) -}}
{{- end -}}
{{- with include "pando.turnsLabel" . }}{{ $labels = append $labels (fromYaml .) }}{{ end -}}
{{- range $labels -}}
{{- $term := dict "topologyKey" "kubernetes.io/hostname" "labelSelector" (dict "matchLabels" .) -}}
{{- $pods := get $affinity "podAffinity" | default dict -}}
{{- $key := "requiredDuringSchedulingIgnoredDuringExecution" -}}
{{- $terms := append (get $pods $key | default list) $term -}}
{{- $_ := set $affinity "podAffinity" (set $pods $key $terms) -}}
{{- end -}}
{{- with $affinity }}{{ toYaml . }}{{ end -}}
{{- end -}}
