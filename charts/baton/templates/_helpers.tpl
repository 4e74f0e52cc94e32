{{/* Names and labels that several templates share. */}}

{{- define "baton.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 50 | trimAll "-." }}
{{- end }}

{{- define "baton.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 50 | trimAll "-." }}
{{- else if contains (include "baton.name" .) .Release.Name }}
{{- printf "%s-operator" .Release.Name | trunc 50 | trimAll "-." }}
{{- else }}
{{- printf "%s-%s-operator" .Release.Name (include "baton.name" .) | trunc 50 | trimAll "-." }}
{{- end }}
{{- end }}

{{/* A name as a DNS label that begins with a letter: a release's may hold dots and begin with a digit. */}}
{{- define "baton.dnsLabel" -}}
{{- regexReplaceAll "^([0-9])" (replace "." "-" .) "r-${1}" }}
{{- end }}

{{- define "baton.selectorLabels" -}}
app.kubernetes.io/name: {{ include "baton.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end }}

{{- define "baton.labels" -}}
{{ include "baton.selectorLabels" . }}
{{ include "baton.chartLabels" . }}
{{- end }}

{{/* Of objects that are not the operator's pods: hooks must not match its selectors. */}}
{{- define "baton.hookLabels" -}}
app.kubernetes.io/name: {{ include "baton.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: hook
{{ include "baton.chartLabels" . }}
{{- end }}

{{- define "baton.chartLabels" -}}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: baton
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "baton.serviceAccountName" -}}
{{- if .Values.serviceAccount.create }}
{{- default (include "baton.fullname" .) .Values.serviceAccount.name }}
{{- else }}
{{- required "serviceAccount.name is needed when serviceAccount.create is false" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{- define "baton.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ default .Chart.AppVersion .Values.image.tag }}
{{- end }}
{{- end }}

{{/* Refuse variables that would be there twice: which counts hangs on who reads, and helm's patch of such a list drops both. */}}
{{- define "baton.checkExtraEnv" -}}
{{- $taken := dict "BATON_IDENTITY" "it is the pod's name" "BATON_WATCH_NAMESPACE" "set watchNamespace" "BATON_WATCH_SECRETS" "set rbac.watchSecrets" "BATON_LEASE_NAME" "it is the release's full name, which its rights are for" "BATON_LEASE_NAMESPACE" "it is the release's namespace" }}
{{- range $key, $_ := .Values.operator }}
{{- $_ := set $taken (printf "BATON_%s" ($key | snakecase | upper)) (printf "set operator.%s" $key) }}
{{- end }}
{{- range .Values.extraEnv }}
{{- if hasKey $taken .name }}
{{- fail (printf "extraEnv: %s is there already: %s" .name (get $taken .name)) }}
{{- end }}
{{- if and (eq .name "BATON_LEADER_ELECT") (gt (int $.Values.replicas) 1) (has (toString .value | lower) (list "false" "0")) }}
{{- fail (printf "extraEnv: BATON_LEADER_ELECT is %v and replicas is %v: without the Lease each of them writes" .value $.Values.replicas) }}
{{- end }}
{{- $_ := set $taken .name "extraEnv names it twice" }}
{{- end }}
{{- end }}

{{- define "baton.podSecurityContext" -}}
runAsNonRoot: true
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "baton.securityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{/* What the operator may do in the namespaces that it serves; docs/operator.md says why. */}}
{{- define "baton.rules" -}}
- apiGroups: [baton.dev]
  resources: [pddeployments]
  verbs: [get, list, watch]
- apiGroups: [baton.dev]
  resources: [pddeployments/status, pdrolescalers/status]
  verbs: [patch]
- apiGroups: [baton.dev]
  resources: [pddeployments/finalizers]
  verbs: [update]
- apiGroups: [baton.dev]
  resources: [pdrolescalers]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [apps]
  resources: [deployments]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [services, configmaps, serviceaccounts]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [secrets]
  verbs: [get, create, patch, delete{{ if .Values.rbac.watchSecrets }}, list, watch{{ end }}]
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch, patch]
- apiGroups: [""]
  resources: [events]
  verbs: [create]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [monitoring.coreos.com]
  resources: [podmonitors]
  verbs: [get, list, watch, create, patch, delete]
{{- end }}
