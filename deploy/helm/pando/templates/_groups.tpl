{{/* Scheduler groups: whether each is one pod, and the number of other groups. */}}
{{- define "pando.together" -}}
{{- if eq .Values.groups.layout "together" -}}
{{- $worker := .Values.worker -}}
{{- if or $worker.leaderWorkerSet.enabled (ne (include "pando.workerPods" . | int) 1) -}}
{{- fail "groups.layout together needs all ranks of a group in one pod: worker.ranksPerPod 0, and no leaderWorkerSet" -}}
{{- end -}}
true
{{- else if ne .Values.groups.autoscaling.mode "off" -}}
{{- fail "groups.autoscaling needs groups.layout together: only whole groups can be added and taken away" -}}
{{- end -}}
{{- end -}}

{{/* The groups whose scheduler and workers are separate objects, as a JSON list of numbers. */}}
{{- define "pando.separateGroups" -}}
{{- ternary (list) (until (int .Values.groups.replicas)) (eq "true" (include "pando.together" .)) | toJson -}}
{{- end -}}

{{/* The components that run in pods, by name, as a mapping to the numbers of their groups, if any. */}}
{{- define "pando.pods" -}}
{{- $pods := dict "gateway" (dict) "tokenizer" (dict) "detokenizer" (dict) -}}
{{- if include "pando.together" . -}}
{{- $_ := set $pods "group" (dict) -}}
{{- else -}}
{{- $groups := include "pando.separateGroups" . | fromJsonArray -}}
{{- $_ := set $pods "scheduler" (dict "groups" $groups) -}}
{{- $_ := set $pods "worker" (dict "groups" $groups) -}}
{{- end -}}
{{- $pods | toJson -}}
{{- end -}}

{{/* Addresses of the schedulers, for services that choose one: a JSON list. Groups that are pods are found by DNS. */}}
{{- define "pando.schedulers" -}}
{{- $port := (include "pando.pipeline" . | fromYaml).scheduler.port | int -}}
{{- $addresses := list -}}
{{- if include "pando.together" . -}}
{{- $addresses = list (printf "dns:%s-group:%d" (include "pando.fullname" .) $port) -}}
{{- end -}}
{{- range $group := include "pando.separateGroups" . | fromJsonArray -}}
{{- $addresses = append $addresses (printf "%s:%d" (include "pando.name" (dict "root" $ "name" "scheduler" "group" (int $group))) $port) -}}
{{- end -}}
{{- $addresses | toJson -}}
{{- end -}}

{{/* The host name of worker pod `pod` of a group; LeaderWorkerSet names a leader <set>-0 and its others <set>-0-1 and on. */}}
{{- define "pando.workerHost" -}}
{{- if include "pando.together" .root -}}
$(POD_NAME).{{ include "pando.fullname" .root }}-group.{{ .root.Release.Namespace }}.svc
{{- else -}}
{{- $set := include "pando.name" (dict "root" .root "name" "worker" "group" .group) -}}
{{- $pod := printf "%s-%d" $set (int .pod) -}}
{{- if .root.Values.worker.leaderWorkerSet.enabled -}}
{{- $pod = ternary (printf "%s-0" $set) (printf "%s-0-%d" $set (int .pod)) (eq 0 (int .pod)) -}}
{{- end -}}
{{- printf "%s.%s.%s.svc" $pod $set .root.Release.Namespace -}}
{{- end -}}
{{- end -}}

{{/* The workers of a scheduler, as variables of its container: the only difference between groups. Takes {root, group}. */}}
{{- define "pando.groupVariables" -}}
{{- $pipeline := include "pando.pipeline" .root | fromYaml -}}
{{- $addresses := list -}}
{{- range $pod := until (include "pando.workerPods" .root | int) -}}
{{- $host := include "pando.workerHost" (dict "root" $.root "group" $.group "pod" $pod) -}}
{{- range $rank := until (include "pando.ranksPerPod" $.root | int) -}}
{{- $addresses = append $addresses (printf "%s:%d" $host (add $pipeline.worker.port $rank)) -}}
{{- end -}}
{{- end -}}
{{- if include "pando.together" .root }}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
{{- end }}
- name: PANDO_SCHEDULER__WORKERS
  value: {{ $addresses | toJson | quote }}
- name: PANDO_SCHEDULER__RENDEZVOUS
  value: {{ printf "%s:29555" (include "pando.workerHost" (dict "root" .root "group" .group "pod" 0)) | quote }}
{{- end -}}
