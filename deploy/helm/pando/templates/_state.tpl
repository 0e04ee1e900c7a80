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

{{/* The claim with the locks of the releases that take turns on a GPU; empty: none. Values that do not fit are refused. */}}
{{- define "pando.turnsClaim" -}}
{{- $turns := .Values.deviceTurns -}}
{{- if or $turns.existingClaim $turns.create -}}
{{- if or (ne (int .Values.groups.replicas) 1) (ne .Values.groups.autoscaling.mode "off") -}}
{{- fail "deviceTurns needs one group: groups.replicas 1, and groups.autoscaling.mode off" -}}
{{- else if or .Values.worker.leaderWorkerSet.enabled (gt (include "pando.workerPods" . | int) 1) -}}
{{- fail "deviceTurns needs all ranks in one pod: worker.ranksPerPod 0, and no worker.leaderWorkerSet" -}}
{{- end -}}
{{- $turns.existingClaim | default (printf "%s-turns" (include "pando.fullname" .)) -}}
{{- end -}}
{{- end -}}

{{/* The label of all pods that take turns with those of this release; takes {root, name}; empty: these pods do not. */}}
{{- define "pando.turnsLabel" -}}
{{- if has .name (list "group" "scheduler" "worker") -}}
{{- with include "pando.turnsClaim" .root -}}
pando/device-turns: {{ . | trunc 63 | trimSuffix "-" | quote }}
{{- end -}}
{{- end -}}
{{- end -}}
