{{- define "sluice.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 47 | trimSuffix "-" -}}
{{- end -}}

{{/* Full name of the release. KubeRay takes names of 47 characters at most. */}}
{{- define "sluice.fullname" -}}
{{- $name := include "sluice.name" . -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 47 | trimSuffix "-" -}}
{{- else if contains $name .Release.Name -}}
{{- .Release.Name | trunc 47 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 47 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "sluice.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
app.kubernetes.io/name: {{ include "sluice.name" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{ include "sluice.selector" . }}
{{- end -}}

{{/* What all pods of the release have. Not app.kubernetes.io/name: KubeRay sets that one itself,
and the service of the head selects by it. */}}
{{- define "sluice.selector" -}}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/part-of: sluice
{{- end -}}

{{- define "sluice.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "sluice.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{/* Name of the Secret with the keys of `kind`, api, admin or metrics, or nothing. */}}
{{- define "sluice.keysSecret" -}}
{{- $values := index .root.Values (printf "%sKeys" .kind) -}}
{{- if and $values.existingSecret $values.entries -}}
{{- fail (printf "%sKeys: set existingSecret or entries, not both" .kind) -}}
{{- end -}}
{{- if $values.existingSecret -}}
{{- $values.existingSecret -}}
{{- else if $values.entries -}}
{{- printf "%s-%s-keys" (include "sluice.fullname" .root) .kind -}}
{{- end -}}
{{- end -}}

{{- define "sluice.image" -}}
{{- with .Values.image -}}
{{- if .digest -}}
{{- printf "%s@%s" .repository .digest -}}
{{- else -}}
{{- printf "%s:%s" .repository (default $.Chart.AppVersion .tag) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Name of the Secret with the token of the Hugging Face Hub, or nothing. */}}
{{- define "sluice.hfSecret" -}}
{{- with .Values.hfToken -}}
{{- if and .existingSecret .value -}}
{{- fail "hfToken: set existingSecret or value, not both" -}}
{{- end -}}
{{- if .existingSecret -}}
{{- .existingSecret -}}
{{- else if .value -}}
{{- printf "%s-hf-token" (include "sluice.fullname" $) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Name of the claim of the model cache, or nothing. */}}
{{- define "sluice.cacheClaim" -}}
{{- if .Values.modelCache.existingClaim -}}
{{- .Values.modelCache.existingClaim -}}
{{- else if .Values.modelCache.create -}}
{{- printf "%s-cache" (include "sluice.fullname" .) -}}
{{- end -}}
{{- end -}}

{{/* The Sluice configuration with what the chart adds. */}}
{{- define "sluice.config" -}}
{{- $config := deepCopy .Values.config -}}
{{- $router := default dict $config.router -}}
{{- if or $router.api_keys $router.api_keys_file -}}
{{- fail "config.router: keys do not belong there, everybody who may read the RayService sees them: use apiKeys" -}}
{{- end -}}
{{- if or $router.host $router.port -}}
{{- fail "config.router: host and port are the chart's: 0.0.0.0 and 8000" -}}
{{- end -}}
{{- if $router.tls -}}
{{- fail "config.router.tls: KubeRay probes routers by plain HTTP; end TLS in an Ingress or a Gateway" -}}
{{- end -}}
{{- $_ := set $router "host" "0.0.0.0" -}}
{{- $_ := set $router "port" 8000 -}}
{{- if $router.picker -}}
{{- if $router.picker.host -}}
{{- fail "config.router.picker: host is the chart's: 0.0.0.0" -}}
{{- end -}}
{{- $_ := set $router.picker "host" "0.0.0.0" -}}
{{- end -}}
{{- with .Values.picker.workerGroup -}}
{{- $_ := set $router "node_labels" (merge (include "sluice.groupLabel" . | fromYaml) (default dict $router.node_labels)) -}}
{{- end -}}
{{- if include "sluice.keysSecret" (dict "root" . "kind" "api") -}}
{{- $_ := set $router "api_keys_file" "/etc/sluice/api-keys/keys.yaml" -}}
{{- end -}}
{{- range $kind := list "admin" "metrics" -}}
{{- $part := default dict (index $router $kind) -}}
{{- if or $part.keys $part.keys_file -}}
{{- fail (printf "config.router.%s: keys do not belong there, everybody who may read the RayService sees them: use %sKeys" $kind $kind) -}}
{{- end -}}
{{- if include "sluice.keysSecret" (dict "root" $ "kind" $kind) -}}
{{- $_ := set $part "keys_file" (printf "/etc/sluice/%s-keys/keys.yaml" $kind) -}}
{{- $_ := set $router $kind $part -}}
{{- end -}}
{{- end -}}
{{- $_ := set $config "router" $router -}}
{{- toYaml $config -}}
{{- end -}}

{{/* Label of the pods of a group of workers, by its name. */}}
{{- define "sluice.groupLabel" -}}
sluice/worker-group: {{ . }}
{{- end -}}

{{/* The group of workers of the routers that a Service of the endpoint picker selects, or nothing. */}}
{{- define "sluice.pickerGroup" -}}
{{- with .Values.picker.workerGroup -}}
{{- if not (dig "router" "picker" "port" 0 $.Values.config) -}}
{{- fail "picker.workerGroup: set config.router.picker.port, the port of the endpoint picker" -}}
{{- end -}}
{{- $names := list -}}
{{- range $.Values.workers -}}
{{- $names = append $names .name -}}
{{- end -}}
{{- if not (has . $names) -}}
{{- fail (printf "picker.workerGroup: %q is none of the groups of workers: %s" . (join ", " $names)) -}}
{{- end -}}
{{- . -}}
{{- end -}}
{{- end -}}

{{/* What `serve deploy` would take. */}}
{{- define "sluice.serveConfig" -}}
# Routers listen themselves.
proxy_location: Disabled
applications:
  - name: sluice
    route_prefix: null
    import_path: sluice.deploy.app:build
    args:
      {{- include "sluice.config" . | nindent 6 }}
{{- end -}}

{{/* Not empty if requests need an API key or a token. */}}
{{- define "sluice.needsKey" -}}
{{- if or (include "sluice.keysSecret" (dict "root" . "kind" "api")) (dig "router" "issuers" dict .Values.config) -}}
true
{{- end -}}
{{- end -}}

{{/* What KubeRay needs for an upgrade in steps, and what would lead clients past its Gateway. */}}
{{- define "sluice.checkIncrementalUpgrade" -}}
{{- $strategy := "upgrade.strategy NewClusterWithIncrementalUpgrade" -}}
{{- $options := .Values.upgrade.clusterUpgradeOptions -}}
{{- if not $options.gatewayClassName -}}
{{- fail (printf "%s: set upgrade.clusterUpgradeOptions.gatewayClassName" $strategy) -}}
{{- end -}}
{{- if gt (int $options.stepSizePercent) (int $options.maxSurgePercent) -}}
{{- fail (printf "%s: stepSizePercent must be at most maxSurgePercent" $strategy) -}}
{{- end -}}
{{- if not .Values.autoscaling.enabled -}}
{{- fail (printf "%s: set autoscaling.enabled, which adds and removes the workers" $strategy) -}}
{{- end -}}
{{- if or .Values.ingress.enabled .Values.httpRoute.enabled .Values.picker.workerGroup -}}
{{- fail (printf "%s: clients come through the Gateway that KubeRay makes; ingress, httpRoute and picker would lead to the old cluster while its capacity shrinks" $strategy) -}}
{{- end -}}
{{- include "sluice.requireKeys" . -}}
{{- end -}}

{{/* Rules of an Ingress, an HTTPRoute or KubeRay's Gateway must not expose an application that requires no key or token. */}}
{{- define "sluice.requireKeys" -}}
{{- if not (or .Values.apiKeys.anonymous (include "sluice.needsKey" .)) -}}
{{- fail "an Ingress, an HTTPRoute or a Gateway would let everybody in: set apiKeys or config.router.issuers, or apiKeys.anonymous to true" -}}
{{- end -}}
{{- end -}}
