{{/* Template of a Ray pod. Takes root, group (the values of the group) and component. Liveness and
readiness probes are KubeRay's where the group states none. The startup probe must not wait for a
model: the application starts on Ray nodes that are ready, and some workers have no replica. */}}
{{- define "sluice.podTemplate" -}}
{{- $root := .root -}}
{{- $group := .group -}}
{{- $head := eq .component "head" -}}
{{- $picks := and (not $head) (eq (include "sluice.pickerGroup" $root) $group.name) -}}
{{- $picker := dig "router" "picker" "port" 0 $root.Values.config | int -}}
{{- $grace := $group.terminationGracePeriodSeconds -}}
{{- if not $head }}{{ $grace = int (default 900 $grace) }}{{ end -}}
metadata:
  labels:
    {{- include "sluice.selector" $root | nindent 4 }}
    app.kubernetes.io/component: {{ .component }}
    {{- if not $head }}
    {{- include "sluice.groupLabel" $group.name | nindent 4 }}
    {{- end }}
    {{- with $group.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with $group.podAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  serviceAccountName: {{ include "sluice.serviceAccountName" $root }}
  # Only the autoscaler beside the head talks to Kubernetes.
  automountServiceAccountToken: {{ and $head $root.Values.autoscaling.enabled }}
  enableServiceLinks: false
  securityContext:
    {{- toYaml $root.Values.podSecurityContext | nindent 4 }}
  {{- with $root.Values.image.pullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- range $field := list "nodeSelector" "tolerations" "affinity" "topologySpreadConstraints" "priorityClassName" "runtimeClassName" }}
  {{- with index $group $field }}
  {{ $field }}:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- end }}
  {{- with $grace }}
  terminationGracePeriodSeconds: {{ . }}
  {{- end }}
  {{- with $group.initContainers }}
  # KubeRay adds one of its own behind these, which waits for the head.
  initContainers:
    {{- range . }}
    {{- $own := hasKey . "securityContext" | ternary . (set (deepCopy .) "securityContext" $root.Values.securityContext) }}
    - {{- tpl (toYaml $own) $root | nindent 6 }}
    {{- end }}
  {{- end }}
  containers:
    - name: {{ ternary "ray-head" "ray-worker" $head }}
      image: {{ include "sluice.image" $root | quote }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      ports:
        {{- if $head }}
        - {name: gcs-server, containerPort: 6379}
        - {name: dashboard, containerPort: 8265}
        - {name: client, containerPort: 10001}
        {{- end }}
        - {name: serve, containerPort: 8000}
        - {name: metrics, containerPort: 8080}
        {{- if $picks }}
        - {name: picker, containerPort: {{ $picker }}}
        {{- end }}
      env:
        {{- range $name, $value := $root.Files.Get "files/ray-env.yaml" | fromYaml }}
        - name: {{ $name }}
          value: {{ $value | quote }}
        {{- end }}
        {{- with include "sluice.hfSecret" $root }}
        - name: HF_TOKEN
          valueFrom:
            secretKeyRef: {name: {{ . }}, key: {{ $root.Values.hfToken.key }}}
        {{- end }}
        {{- with concat (default list $root.Values.env) (default list $group.env) }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- with $root.Values.envFrom }}
      envFrom:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      resources:
        {{- toYaml $group.resources | nindent 8 }}
      securityContext:
        {{- toYaml $root.Values.securityContext | nindent 8 }}
      {{- if not $head }}
      # What serves here moves or ends before the pod does, once the Service has dropped the pod.
      lifecycle:
        preStop:
          exec:
            command:
              - sh
              - -c
              - |
                serves() { grep -qs 'ray::Serve[R]eplica' /proc/[0-9]*/cmdline; }
                serves || exit 0
                sleep 5
                timeout 60 ray drain-node --reason DRAIN_NODE_REASON_PREEMPTION --reason-message 'the pod ends' \
                  --deadline-remaining-seconds {{ max 0 (sub $grace 10) }} || exit 0
                while serves; do sleep 1; done
      {{- end }}
      {{- if not (hasKey $group "startupProbe") }}
      startupProbe:
        httpGet:
          path: /api/healthz
          port: {{ dig "rayStartParams" "dashboard-agent-listen-port" "52365" $group }}
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: 180
      {{- end }}
      {{- if and $picks (not (hasKey $group "readinessProbe")) }}
      # A router is there, and replicas take requests.
      readinessProbe:
        grpc: {port: {{ $picker }}}
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: 2
      {{- end }}
      {{- range $probe := list "startupProbe" "livenessProbe" "readinessProbe" }}
      {{- with index $group $probe }}
      {{ $probe }}:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- end }}
      volumeMounts:
        {{- include "sluice.volumeMounts" . | nindent 8 }}
  volumes:
    {{- include "sluice.volumes" . | nindent 4 }}
{{- end -}}

{{/* The folders that are written: the containers' root file system is read-only. */}}
{{- define "sluice.scratchMounts" -}}
- name: tmp
  mountPath: /tmp
- name: home
  mountPath: /home/sluice
{{- end -}}

{{- define "sluice.volumeMounts" -}}
{{ include "sluice.scratchMounts" .root }}
- name: cache
  mountPath: /home/sluice/.cache
- name: config
  mountPath: /etc/sluice/config
  readOnly: true
{{- range $kind := list "api" "admin" "metrics" }}
{{- if include "sluice.keysSecret" (dict "root" $.root "kind" $kind) }}
- name: {{ $kind }}-keys
  mountPath: /etc/sluice/{{ $kind }}-keys
  readOnly: true
{{- end }}
{{- end }}
{{- with concat (default list .root.Values.volumeMounts) (default list .group.volumeMounts) }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "sluice.volumes" -}}
{{- range $name := list "tmp" "home" }}
- name: {{ $name }}
  emptyDir:
    sizeLimit: {{ $.root.Values.scratchSize }}
{{- end }}
- name: cache
  {{- with include "sluice.cacheClaim" .root }}
  persistentVolumeClaim:
    claimName: {{ . }}
  {{- else }}
  emptyDir:
    sizeLimit: {{ .root.Values.modelCache.ephemeralSize }}
  {{- end }}
- name: config
  configMap:
    name: {{ include "sluice.fullname" .root }}-config
{{- range $kind := list "api" "admin" "metrics" }}
{{- with include "sluice.keysSecret" (dict "root" $.root "kind" $kind) }}
- name: {{ $kind }}-keys
  secret:
    secretName: {{ . }}
    # For the pod's group: the files are root's.
    defaultMode: 0440
{{- end }}
{{- end }}
{{- with concat (default list .root.Values.volumes) (default list .group.volumes) }}
{{ toYaml . }}
{{- end }}
{{- end -}}
