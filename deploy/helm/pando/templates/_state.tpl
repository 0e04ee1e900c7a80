{{/* The claim with the keyring of stored KV pages; empty without a storage. Refuses a storage whose keyring a restart would lose. */}}
{{- define "pando.keyringClaim" -}}
{{- $keyring := .Values.keyring -}}
{{- if or $keyring.existingClaim $keyring.create -}}
{{ $keyring.existingClaim | default (printf "%s-keyring" (include "pando.fullname" .)) }}
{{- else if dig "worker" "storage" "location" "" .Values.settings -}}
{{- fail "settings.worker.storage.location needs keyring.create or keyring.existingClaim: the keyring has the names of stored pages, and which of them are revoked; it must survive restarts and be the same for all groups" -}}
{{- end -}}
{{- end -}}

{{/* The claim with the stored responses of a single gateway; empty if there is none. */}}
{{- define "pando.responsesClaim" -}}
{{- $responses := .Values.gateway.responses -}}
{{- if or $responses.existingClaim $responses.create -}}
{{- if or .Values.gateway.state.url .Values.gateway.state.existingSecret -}}
{{- fail "gateway.responses is for a single gateway: the server of gateway.state has the responses of several" -}}
{{- end -}}
{{ $responses.existingClaim | default (printf "%s-responses" (include "pando.fullname" .)) }}
{{- end -}}
{{- end -}}

{{/* The claim to which gateways and schedulers append their audit logs; empty: none. */}}
{{- define "pando.auditClaim" -}}
{{- with .Values.audit -}}
{{- if or .existingClaim .create }}{{ .existingClaim | default (printf "%s-audit" (include "pando.fullname" $)) }}{{ end -}}
{{- end -}}
{{- end -}}
