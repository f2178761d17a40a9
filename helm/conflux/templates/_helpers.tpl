{{/* Name of the RayService, and the beginning of every other name. */}}
{{- define "conflux.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else if contains .Chart.Name .Release.Name -}}
{{- .Release.Name -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name -}}
{{- end -}}
{{- end -}}

{{/* Labels of the chart's own objects. */}}
{{- define "conflux.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{/* Labels by which this release's pods are found. Not app.kubernetes.io/name: KubeRay's services select by its own. */}}
{{- define "conflux.podLabels" -}}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/part-of: {{ .Chart.Name }}
{{- end -}}

{{- define "conflux.image" -}}
{{- printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) -}}
{{- end -}}

{{/* What conflux_ray.app:build gets. */}}
{{- define "conflux.args" -}}
{{- $args := deepCopy .Values.conflux -}}
{{- if .Values.apiKeys.secretName -}}
{{- $ingress := merge (dict "api_key_file" "/etc/conflux/api-keys/keys") (default (dict) $args.ingress) -}}
{{- $_ := set $args "ingress" $ingress -}}
{{- end -}}
{{- toYaml $args -}}
{{- end -}}

{{/* The Ray Serve configuration. */}}
{{- define "conflux.serveConfig" -}}
proxy_location: EveryNode
http_options:
  host: 0.0.0.0
  port: {{ int .Values.service.port }}
applications:
  - name: conflux
    route_prefix: /
    import_path: conflux_ray.app:build
    args:
      {{- include "conflux.args" . | nindent 6 }}
{{- end -}}

{{/* Worker groups that are enabled, with workerDefaults filled in, as a YAML map. */}}
{{- define "conflux.groups" -}}
{{- $groups := dict -}}
{{- range $name, $group := .Values.workerGroups -}}
{{- if ne (toString $group.enabled) "false" -}}
{{- $_ := set $groups $name (mergeOverwrite (deepCopy $.Values.workerDefaults) (deepCopy $group)) -}}
{{- end -}}
{{- end -}}
{{- toYaml $groups -}}
{{- end -}}

{{/* A quantity like 16Gi in MiB; 0 for one without a binary unit. */}}
{{- define "conflux.mebibytes" -}}
{{- $units := dict "Ki" 0.0009765625 "Mi" 1.0 "Gi" 1024.0 "Ti" 1048576.0 -}}
{{- $unit := regexFind "[KMGT]i$" . -}}
{{- if $unit -}}
{{- mulf (trimSuffix $unit . | float64) (get $units $unit) | floor | int64 -}}
{{- else -}}
0
{{- end -}}
{{- end -}}

{{/* Seconds that a pod's preStop may take: what is left for Ray to stop is 30. */}}
{{- define "conflux.preStopSeconds" -}}
{{- sub (int .Values.drain.terminationGracePeriodSeconds) 30 -}}
{{- end -}}

{{/* Environment of every container of ours. */}}
{{- define "conflux.env" -}}
- name: HOME
  value: /home/conflux
- name: HF_HOME
  value: {{ .Values.modelCache.mountPath }}/huggingface
- name: CONFLUX_MODEL_DIR
  value: {{ .Values.modelCache.mountPath }}/conflux
# Each change of replicas reloads HAProxy; its old process, with the streams it holds, would be killed after 120 s.
- name: RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S
  value: {{ .Values.drain.terminationGracePeriodSeconds | int | quote }}
{{- with .Values.hfToken.secretName }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ . }}
      key: {{ $.Values.hfToken.secretKey }}
{{- end }}
{{- with .Values.env }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "conflux.volumeMounts" -}}
- name: tmp
  mountPath: /tmp
- name: shared-memory
  mountPath: /dev/shm
- name: home
  mountPath: /home/conflux
- name: models
  mountPath: {{ .Values.modelCache.mountPath }}
{{- if .Values.apiKeys.secretName }}
- name: api-keys
  mountPath: /etc/conflux/api-keys
  readOnly: true
{{- end }}
{{- end -}}

{{/* Volumes; takes a dict of `root`, `sharedMemory` and `scratch`. */}}
{{- define "conflux.volumes" -}}
- name: tmp
  emptyDir:
    sizeLimit: {{ .scratch }}
- name: shared-memory
  emptyDir:
    medium: Memory
    sizeLimit: {{ .sharedMemory }}
- name: home
  emptyDir:
    sizeLimit: {{ .scratch }}
- name: models
{{- with .root.Values.modelCache }}
{{- if .enabled }}
  persistentVolumeClaim:
    claimName: {{ default (printf "%s-models" (include "conflux.fullname" $.root)) .existingClaim }}
{{- else }}
  emptyDir:
    sizeLimit: {{ .size }}
{{- end }}
{{- end }}
{{- with .root.Values.apiKeys }}
{{- if .secretName }}
- name: api-keys
  secret:
    secretName: {{ .secretName }}
    defaultMode: 0440
    items:
      - key: {{ .secretKey }}
        path: keys
{{- end }}
{{- end }}
{{- end -}}

{{/*
The shell of KubeRay runs this before `ray start`: HAProxy in front and throughput mode, for all that Ray starts. It asks
the image for the variables, since only the image knows where its HAProxy is; without them the pod does not start.
*/}}
{{- define "conflux.beforeRay" -}}
set -e; variables="$(python -m conflux_ray.serving.environment)"; eval "$variables"; set +e; true
{{- end -}}
