{{/*
What values.schema.json cannot say: rules between values. All broken rules are reported together, each with field, value
and remedy.
*/}}
{{- define "conflux.validate" -}}
{{- $errors := list -}}
{{- $name := include "conflux.fullname" . -}}
{{- if or (gt (len $name) 47) (not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $name)) -}}
{{- $errors = append $errors (printf "fullnameOverride=%q: KubeRay needs a name of at most 47 lower-case letters, digits and dashes that begins with a letter; set fullnameOverride" $name) -}}
{{- end -}}

{{- $instance := .Values.conflux.instance -}}
{{- $device := $instance.device -}}
{{- $workers := int (mul $instance.sp_degree $instance.tensor_parallel) -}}
{{- $groups := include "conflux.groups" . | fromYaml -}}
{{- $instances := int $instance.num_replicas -}}
{{- $instancesField := "conflux.instance.num_replicas" -}}
{{- with $instance.autoscaling -}}
{{- $instances = int .max_replicas -}}
{{- $instancesField = "conflux.instance.autoscaling.max_replicas" -}}
{{- if lt (int .max_replicas) (int (default 1 .min_replicas)) -}}
{{- $errors = append $errors (printf "conflux.instance.autoscaling.max_replicas=%d: below min_replicas=%d; raise it" (int .max_replicas) (int (default 1 .min_replicas))) -}}
{{- end -}}
{{- end -}}

{{- if eq $device "auto" -}}
{{- $errors = append $errors "conflux.instance.device=auto: the head would decide before GPU workers have joined; set cuda or cpu" -}}
{{- end -}}
{{- if not $groups -}}
{{- $errors = append $errors "workerGroups: none is enabled; add one" -}}
{{- end -}}

{{- $room := 0 -}}
{{- $cpus := 0 -}}
{{- range $group, $it := $groups -}}
{{- $gpus := int (default 0 $it.gpus) -}}
{{- $replicas := ternary (int (default $it.replicas $it.maxReplicas)) (int $it.replicas) $.Values.autoscaler.enabled -}}
{{- $cpus = add $cpus (mul $replicas $it.cpu) -}}
{{- if $.Values.autoscaler.enabled -}}
{{- if or (lt $replicas (int $it.replicas)) (gt (int (default 0 $it.minReplicas)) (int $it.replicas)) -}}
{{- $errors = append $errors (printf "workerGroups.%s.replicas=%d: not between minReplicas=%d and maxReplicas=%d; correct one of them" $group (int $it.replicas) (int (default 0 $it.minReplicas)) $replicas) -}}
{{- end -}}
{{- end -}}
{{- if eq $device "cuda" -}}
{{- if and (gt $gpus 0) (lt $gpus $workers) -}}
{{- $errors = append $errors (printf "workerGroups.%s.gpus=%d: all workers of an instance share one node (STRICT_PACK), and an instance has sp_degree x tensor_parallel = %d x %d = %d with a GPU each; raise it to a multiple of %d, or lower conflux.instance.sp_degree or tensor_parallel" $group $gpus (int $instance.sp_degree) (int $instance.tensor_parallel) $workers $workers) -}}
{{- else if gt $gpus 0 -}}
{{- $fit := div $gpus $workers -}}
{{- $room = add $room (mul $replicas $fit) -}}
{{- $need := mul $fit (add $workers 1) -}}
{{- if lt (int $it.cpu) (int $need) -}}
{{- $errors = append $errors (printf "workerGroups.%s.cpu=%d: %d instance(s) in a pod take a CPU for each of %d workers and one more each; raise it to at least %d" $group (int $it.cpu) (int $fit) $workers (int $need)) -}}
{{- end -}}
{{- end -}}
{{- else if gt $gpus 0 -}}
{{- $errors = append $errors (printf "workerGroups.%s.gpus=%d: conflux.instance.device=%s uses none; leave it out, or set device to cuda" $group $gpus $device) -}}
{{- else -}}
{{- /* On the CPU an instance takes a tenth of a CPU for itself and for each worker. */ -}}
{{- $room = add $room (mul $replicas (div (mul 10 $it.cpu) (add $workers 1))) -}}
{{- end -}}
{{- end -}}
{{- if and $groups (not (contains "STRICT_PACK" (join " " $errors))) (ne $device "auto") (lt (int $room) $instances) -}}
{{- $what := ternary "GPUs" "CPUs" (eq $device "cuda") -}}
{{- $more := ternary "maxReplicas" "replicas" .Values.autoscaler.enabled -}}
{{- $hint := ternary ", or set autoscaler.enabled" "" (and (not .Values.autoscaler.enabled) (hasKey $instance "autoscaling")) -}}
{{- $errors = append $errors (printf "%s=%d: the worker groups have %s for %d instance(s) of %d workers; raise %s or the size of a group%s" $instancesField $instances $what (int $room) $workers $more $hint) -}}
{{- else if and (eq $device "cuda") $groups -}}
{{- $need := add (mul $instances (add $workers 1)) (int .Values.conflux.ingress.num_replicas) -}}
{{- if and (gt (int $room) 0) (lt (int $cpus) (int $need)) -}}
{{- $errors = append $errors (printf "conflux.ingress.num_replicas=%d: instances and ingresses take %d CPUs, the worker groups have %d; raise cpu of a group" (int .Values.conflux.ingress.num_replicas) (int $need) (int $cpus)) -}}
{{- end -}}
{{- end -}}

{{- $longest := int (ceil $instance.drain_timeout_s) -}}
{{- if lt (int .Values.drain.terminationGracePeriodSeconds) (int (add $longest 90)) -}}
{{- $errors = append $errors (printf "drain.terminationGracePeriodSeconds=%d: shorter than the longest stream, conflux.instance.drain_timeout_s=%d, and 90 s to stop; raise it to at least %d" (int .Values.drain.terminationGracePeriodSeconds) $longest (int (add $longest 90))) -}}
{{- end -}}
{{- if and (ne .Values.upgrade.strategy "None") (lt (int .Values.upgrade.clusterDeletionDelaySeconds) $longest) -}}
{{- $errors = append $errors (printf "upgrade.clusterDeletionDelaySeconds=%d: the old cluster would go before the longest stream has ended, conflux.instance.drain_timeout_s=%d; raise it to at least %d" (int .Values.upgrade.clusterDeletionDelaySeconds) $longest $longest) -}}
{{- end -}}
{{- if eq .Values.upgrade.strategy "NewClusterWithIncrementalUpgrade" -}}
{{- if not .Values.autoscaler.enabled -}}
{{- $errors = append $errors "upgrade.strategy=NewClusterWithIncrementalUpgrade: KubeRay needs Ray's autoscaler for it; set autoscaler.enabled" -}}
{{- end -}}
{{- if not .Values.upgrade.gatewayClassName -}}
{{- $errors = append $errors "upgrade.gatewayClassName=\"\": NewClusterWithIncrementalUpgrade moves traffic through a Gateway; name its class" -}}
{{- end -}}
{{- if gt (int .Values.upgrade.stepSizePercent) (int .Values.upgrade.maxSurgePercent) -}}
{{- $errors = append $errors (printf "upgrade.stepSizePercent=%d: above maxSurgePercent=%d; lower it" (int .Values.upgrade.stepSizePercent) (int .Values.upgrade.maxSurgePercent)) -}}
{{- end -}}
{{- end -}}

{{- if and .Values.apiKeys.secretName .Values.conflux.ingress.api_key_file -}}
{{- $errors = append $errors (printf "conflux.ingress.api_key_file=%q: apiKeys.secretName=%q mounts the keys and names their file; remove one of them" .Values.conflux.ingress.api_key_file .Values.apiKeys.secretName) -}}
{{- end -}}
{{- if and .Values.gcsFaultTolerance.enabled (not .Values.gcsFaultTolerance.redisAddress) -}}
{{- $errors = append $errors "gcsFaultTolerance.redisAddress=\"\": Ray's state needs a Redis; give its host:port, or turn gcsFaultTolerance.enabled off" -}}
{{- end -}}
{{- if and .Values.gcsFaultTolerance.externalStorageNamespace (ne .Values.upgrade.strategy "None") -}}
{{- $errors = append $errors (printf "gcsFaultTolerance.externalStorageNamespace=%q: the two clusters of an upgrade would write the same state; leave it empty, or set upgrade.strategy to None" .Values.gcsFaultTolerance.externalStorageNamespace) -}}
{{- end -}}

{{- $pods := dict "head" .Values.head -}}
{{- range $group, $it := $groups -}}
{{- $_ := set $pods (printf "workerGroups.%s" $group) $it -}}
{{- end -}}
{{- $store := div (int64 .Values.objectStoreMemory) 1048576 -}}
{{- range $pod, $it := $pods -}}
{{- range $key := list "num-cpus" "num-gpus" "object-store-memory" -}}
{{- if hasKey (default (dict) $it.rayStartParams) $key -}}
{{- $errors = append $errors (printf "%s.rayStartParams.%s: follows from the pod's resources and objectStoreMemory; remove it" $pod $key) -}}
{{- end -}}
{{- end -}}
{{- $memory := int64 (include "conflux.mebibytes" (default "" $it.sharedMemory)) -}}
{{- if and (gt $memory 0) (lt $memory $store) -}}
{{- $errors = append $errors (printf "%s.sharedMemory=%s: Ray's object store lies in it, objectStoreMemory=%d MiB; raise it" $pod $it.sharedMemory $store) -}}
{{- end -}}
{{- end -}}
{{- if $errors -}}
{{- fail (printf "\n\nThese values cannot be served:\n  - %s\n" (join "\n  - " $errors)) -}}
{{- end -}}
{{- end -}}
