{{/* The sets of groups, as a JSON list of {Role, Values}: one for each role, with the values that it overrides, or a single one without a role. Encoders have the workers' values unless they have their own. Values that do not fit are refused. */}}
{{- define "pando.sets" -}}
{{- $sets := list -}}
{{- $shapes := list -}}
{{- $hasStages := false -}}
{{- $roles := .Values.groups.roles -}}
{{- range $role, $own := $roles -}}
{{- $values := deepCopy $.Values -}}
{{- $_ := set $values "groups" (include "pando.overlaid" (list (omit $values.groups "roles") (omit $own "scheduler" "worker" "encoder" "settings")) | fromJson) -}}
{{- range $section := list "scheduler" "worker" "encoder" "settings" -}}
{{- $_ := set $values $section (include "pando.overlaid" (list (get $values $section) (get $own $section | default dict)) | fromJson) -}}
{{- end -}}
{{- $tier := dig "scheduler" "host_tier" dict $values.settings -}}
{{- if and (eq $role "decode") (not (or $tier.gigabytes $tier.pages)) -}}
{{- fail "groups.roles.decode needs a host tier, where the pages of other groups arrive: set settings.scheduler.host_tier.gigabytes" -}}
{{- end -}}
{{- $shapes = append $shapes (printf "%v x %v" $values.worker.tensorParallel $values.worker.pipelineParallel) | uniq -}}
{{- $hasStages = or $hasStages (gt (int $values.worker.pipelineParallel) 1) -}}
{{- $sets = append $sets (dict "Role" $role "Values" $values) -}}
{{- end -}}
{{- if not $roles -}}
{{- $values := deepCopy .Values -}}
{{- if include "pando.sharesExperts" . }}{{ $_ := set $values.groups "replicas" (int .Values.groups.dataParallel) }}{{ end -}}
{{- $sets = list (dict "Role" "" "Values" $values) -}}
{{- else if gt (int .Values.groups.dataParallel) 1 -}}
{{- fail "groups.dataParallel with groups.roles is not supported by the chart: leave out one of them" -}}
{{- else if not (or (hasKey $roles "both") (hasKey $roles "decode")) -}}
{{- fail "groups.roles needs groups that serve requests beside those that only prefill: both or decode" -}}
{{- else if or .Values.deviceTurns.existingClaim .Values.deviceTurns.create -}}
{{- fail "deviceTurns needs one group: leave out groups.roles" -}}
{{- else if and $hasStages (gt (len $shapes) 1) -}}
{{- fail (printf "groups with worker.pipelineParallel above 1 can only read pages of groups with equal ranks: give all of groups.roles the same tensorParallel and pipelineParallel, not %s" (join " and " $shapes)) -}}
{{- end -}}
{{- range $set := $sets -}}
{{- if gt (int $set.Values.encoder.replicas) 0 -}}
{{- if gt (int $set.Values.worker.pipelineParallel) 1 -}}
{{- fail "encoder.replicas needs groups in one stage, as models in several read texts only: worker.pipelineParallel 1" -}}
{{- else if or $.Values.deviceTurns.existingClaim $.Values.deviceTurns.create -}}
{{- fail "encoder.replicas is not available for models that take turns on a device: leave out deviceTurns" -}}
{{- else if eq (dig "model" "images" "auto" $.Values.settings) "off" -}}
{{- fail "encoder.replicas needs images, which settings.model.images turns off" -}}
{{- end -}}
{{- end -}}
{{- $encoder := deepCopy $set.Values.worker -}}
{{- range $key, $value := $set.Values.encoder }}{{ $_ := set $encoder $key $value }}{{ end -}}
{{- $_ := set $set.Values "encoder" $encoder -}}
{{- end -}}
{{- $sets | toJson -}}
{{- end -}}

{{/* "true" if groups share the experts of a mixture: groups.dataParallel is their number, and each has one worker. Values that do not fit are refused. */}}
{{- define "pando.sharesExperts" -}}
{{- $groups := .Values.groups -}}
{{- $worker := .Values.worker -}}
{{- $size := dig "scheduler" "data_parallel" "size" (int $groups.dataParallel) .Values.settings | int -}}
{{- if ne $size (int $groups.dataParallel) -}}
{{- fail (printf "settings.scheduler.data_parallel.size is %d and groups.dataParallel %d: leave out the former, which the chart sets with the addresses, and set groups.dataParallel" $size (int $groups.dataParallel)) -}}
{{- end -}}
{{- if gt (int $groups.dataParallel) 1 -}}
{{- if not (has (int $groups.replicas) (list 1 (int $groups.dataParallel))) -}}
{{- fail "groups.dataParallel is the number of groups: leave out groups.replicas" -}}
{{- else if eq $groups.layout "separate" -}}
{{- fail "groups.dataParallel needs groups.layout together or auto" -}}
{{- else if ne $groups.autoscaling.mode "off" -}}
{{- fail "groups.dataParallel needs a fixed number of groups, each of which has some of the experts: groups.autoscaling.mode off" -}}
{{- else if or (gt (include "pando.ranks" . | int) 1) $worker.expertParallel -}}
{{- fail "groups.dataParallel needs groups of one worker: worker.tensorParallel 1, worker.pipelineParallel 1 and no worker.expertParallel" -}}
{{- else if or .Values.deviceTurns.existingClaim .Values.deviceTurns.create -}}
{{- fail "deviceTurns needs one group: leave out groups.dataParallel" -}}
{{- else if and (eq $worker.device "cuda") (not $worker.leaderWorkerSet.enabled) -}}
{{- fail "groups.dataParallel on GPUs needs worker.leaderWorkerSet.enabled: if one worker dies, the others may hang, so all restart together" -}}
{{- end -}}
true
{{- end -}}
{{- end -}}

{{/* The field with a pod's number in its LeaderWorkerSet or StatefulSet, from 0, quoted. */}}
{{- define "pando.podIndex" -}}
{{- printf "metadata.labels['%s']" (ternary "leaderworkerset.sigs.k8s.io/worker-index" "apps.kubernetes.io/pod-index" .Values.worker.leaderWorkerSet.enabled) | quote -}}
{{- end -}}

{{/* "true" if the pods of a LeaderWorkerSet are those of one group, and not the groups that share experts. */}}
{{- define "pando.spansPods" -}}
{{- if and .Values.worker.leaderWorkerSet.enabled (not (include "pando.sharesExperts" .)) }}true{{ end -}}
{{- end -}}

{{/* The first mapping with the values of the second one over its own, as JSON; takes a list of both. `mergeOverwrite` would leave out false, 0 and "". */}}
{{- define "pando.overlaid" -}}
{{- $under := deepCopy (first .) -}}
{{- range $key, $value := last . -}}
{{- if and (kindIs "map" $value) (kindIs "map" (get $under $key)) -}}
{{- $_ := set $under $key (include "pando.overlaid" (list (get $under $key) $value) | fromJson) -}}
{{- else -}}
{{- $_ := set $under $key $value -}}
{{- end -}}
{{- end -}}
{{- $under | toJson -}}
{{- end -}}

{{/* "true" if the scheduler of a group is in the pod of its first ranks. Other layouts and values that need it are refused. */}}
{{- define "pando.together" -}}
{{- $groups := .Values.groups -}}
{{- $spansNodes := .Values.worker.leaderWorkerSet.enabled -}}
{{- $fits := or $spansNodes (eq (include "pando.workerPods" . | int) 1) -}}
{{- $isTogether := or (eq $groups.layout "together") (and (eq $groups.layout "auto") $fits) -}}
{{- if and $isTogether (not $fits) -}}
{{- fail "groups.layout together needs all ranks of a group in one pod (worker.ranksPerPod 0), or worker.leaderWorkerSet" -}}
{{- else if and $spansNodes (not $isTogether) -}}
{{- fail "worker.leaderWorkerSet needs groups.layout together or auto: the first pod of each group has its scheduler" -}}
{{- else if and (ne $groups.autoscaling.mode "off") (not $isTogether) -}}
{{- fail "groups.autoscaling needs groups.layout together: only whole groups can be added and taken away" -}}
{{- end -}}
{{- with $isTogether }}{{ . }}{{ end -}}
{{- end -}}

{{/* The groups whose scheduler and workers are separate objects, as a JSON list of numbers. */}}
{{- define "pando.separateGroups" -}}
{{- ternary (list) (until (int .Values.groups.replicas)) (eq "true" (include "pando.together" .)) | toJson -}}
{{- end -}}

{{/* "true" if a set of groups has encoders in pods of their own; otherwise they are in the pods of the schedulers. */}}
{{- define "pando.encoderPods" -}}
{{- if and (gt (int .Values.encoder.replicas) 0) (not (include "pando.together" .)) }}true{{ end -}}
{{- end -}}

{{/* The components of a root that run in pods, by name, as a mapping to the numbers of their groups, if any; those of a set of groups, or all others. */}}
{{- define "pando.pods" -}}
{{- $pods := dict -}}
{{- if not (hasKey . "Role") -}}
{{- $pods = dict "gateway" (dict) "tokenizer" (dict) "detokenizer" (dict) -}}
{{- else if include "pando.together" . -}}
{{- $_ := set $pods "group" (dict) -}}
{{- if include "pando.spansPods" . }}{{ $_ := set $pods "worker" (dict) }}{{ end -}}
{{- else -}}
{{- $groups := include "pando.separateGroups" . | fromJsonArray -}}
{{- $_ := set $pods "scheduler" (dict "groups" $groups) -}}
{{- $_ := set $pods "worker" (dict "groups" $groups) -}}
{{- if include "pando.encoderPods" . }}{{ $_ := set $pods "encoder" (dict "groups" $groups) }}{{ end -}}
{{- end -}}
{{- $pods | toJson -}}
{{- end -}}

{{/* The labels that select all pods of a service; takes {root, service}. Schedulers are in pods of one kind, unless groups have roles. */}}
{{- define "pando.allOf" -}}
{{- if and (eq .service "scheduler") .root.Values.groups.roles -}}
{{ include "pando.releaseSelector" .root }}
{{ include "pando.schedulerLabel" . }}
{{- else -}}
{{- $isTogether := and (eq .service "scheduler") (eq "true" (include "pando.together" .root)) -}}
{{ include "pando.selector" (dict "root" .root "name" (ternary "group" .service $isTogether)) }}
{{- end -}}
{{- end -}}

{{/* Where services that choose a group find all schedulers: a list that does not depend on the number of groups. */}}
{{- define "pando.schedulers" -}}
{{- $port := (include "pando.pipeline" . | fromYaml).scheduler.port | int -}}
{{- list (printf "dns:%s-schedulers:%d" (include "pando.fullname" .) $port) | toJson -}}
{{- end -}}

{{/* The host name of worker pod `pod` of a group. LeaderWorkerSet names the first pod of a group <set>-<group>, others <set>-<group>-<pod>. */}}
{{- define "pando.workerHost" -}}
{{- if include "pando.together" .root -}}
$(POD_NAME){{ with .pod }}-{{ . }}{{ end }}.{{ include "pando.name" (dict "root" .root "name" "group") }}.{{ .root.Release.Namespace }}.svc
{{- else -}}
{{- $set := include "pando.name" (dict "root" .root "name" "worker" "group" .group) -}}
{{- printf "%s-%d.%s.%s.svc" $set (int .pod) $set .root.Release.Namespace -}}
{{- end -}}
{{- end -}}

{{/* The workers and encoders of a scheduler, as variables of its container: the only difference between groups. Takes {root, group}. */}}
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
{{- if include "pando.sharesExperts" .root }}
- name: PANDO_SCHEDULER__DATA_PARALLEL__RANK
  valueFrom: {fieldRef: {fieldPath: {{ include "pando.podIndex" .root }}}}
{{- end }}
- name: PANDO_SCHEDULER__WORKERS
  value: {{ $addresses | toJson | quote }}
- name: PANDO_SCHEDULER__RENDEZVOUS
  value: {{ printf "%s:29555" (include "pando.workerHost" (dict "root" .root "group" .group "pod" 0)) | quote }}
{{- with include "pando.encoderAddresses" . | fromJsonArray }}
- name: PANDO_SCHEDULER__ENCODERS
  value: {{ . | toJson | quote }}
{{- end }}
{{- end -}}

{{/* Where a scheduler finds its encoders, as a JSON list: in pods of their own at one port, in its pod at one after the other. Takes {root, group}. */}}
{{- define "pando.encoderAddresses" -}}
{{- $port := (include "pando.pipeline" .root | fromYaml).encoder.port -}}
{{- $addresses := list -}}
{{- range $number := until (int .root.Values.encoder.replicas) -}}
{{- if include "pando.together" $.root -}}
{{- $addresses = append $addresses (printf "%s:%d" (include "pando.workerHost" (dict "root" $.root "pod" 0)) (add $port $number)) -}}
{{- else -}}
{{- $set := include "pando.name" (dict "root" $.root "name" "encoder" "group" $.group) -}}
{{- $addresses = append $addresses (printf "%s-%d.%s.%s.svc:%d" $set $number $set $.root.Release.Namespace (int $port)) -}}
{{- end -}}
{{- end -}}
{{- $addresses | toJson -}}
{{- end -}}

{{/* The pods of a group's scheduler, workers or encoders, if they are separate; takes {component, replicas}. */}}
{{- define "pando.separateSet" -}}
apiVersion: apps/v1
kind: StatefulSet
metadata:
  {{- include "pando.workloadMetadata" .component | nindent 2 }}
spec:
  replicas: {{ .replicas }}
  serviceName: {{ include "pando.name" .component }}
  # Ranks wait for each other, so they must start in parallel.
  podManagementPolicy: Parallel
  # An upgrade would replace all groups at once. Delete the pods of one group after the other instead (README).
  updateStrategy: {type: OnDelete}
  selector:
    matchLabels:
      {{- include "pando.selector" .component | nindent 6 }}
  template:
    {{- include "pando.podTemplate" .component | nindent 4 }}
{{- end -}}
