{{/* What `helm test` and the uninstall hook share: a script of files/ run once by the operator's image. */}}

{{- define "baton.hookAnnotations" -}}
helm.sh/hook: {{ .hook }}
helm.sh/hook-weight: {{ .weight | quote }}
{{/* What succeeded is removed, rights and all: helm uninstall does not remove hooks. What failed stays to be looked at. */ -}}
helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
{{- end }}

{{/* A ConfigMap with scripts, a ServiceAccount, its role and binding. Takes root, name, hook, script, namespace, rules. */}}
{{- define "baton.hookAccess" -}}
{{- $annotations := include "baton.hookAnnotations" (dict "hook" .hook "weight" "-5") }}
{{- $labels := include "baton.hookLabels" .root }}
{{- $scope := ternary "" "Cluster" (not (empty .namespace)) }}
apiVersion: v1
kind: ConfigMap
metadata:
  name: {{ .name }}
  namespace: {{ .root.Release.Namespace }}
  labels: {{- $labels | nindent 4 }}
  annotations: {{- $annotations | nindent 4 }}
data:
  kube_rest.py: |
    {{- .root.Files.Get "files/kube_rest.py" | nindent 4 }}
  {{ .script }}: |
    {{- .root.Files.Get (printf "files/%s" .script) | nindent 4 }}
---
apiVersion: v1
kind: ServiceAccount
metadata:
  name: {{ .name }}
  namespace: {{ .root.Release.Namespace }}
  labels: {{- $labels | nindent 4 }}
  annotations: {{- $annotations | nindent 4 }}
automountServiceAccountToken: false
---
apiVersion: rbac.authorization.k8s.io/v1
kind: {{ $scope }}Role
metadata:
  name: {{ .name }}
  {{- with .namespace }}
  namespace: {{ . }}
  {{- end }}
  labels: {{- $labels | nindent 4 }}
  annotations: {{- $annotations | nindent 4 }}
rules: {{- .rules | nindent 2 }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: {{ $scope }}RoleBinding
metadata:
  name: {{ .name }}
  {{- with .namespace }}
  namespace: {{ . }}
  {{- end }}
  labels: {{- $labels | nindent 4 }}
  annotations: {{- $annotations | nindent 4 }}
roleRef:
  apiGroup: rbac.authorization.k8s.io
  kind: {{ $scope }}Role
  name: {{ .name }}
subjects:
  - kind: ServiceAccount
    name: {{ .name }}
    namespace: {{ .root.Release.Namespace }}
{{- end }}

{{/* Labels of a hook's pod: what a namespace asks of the operator's pods, it asks of hooks' too. */}}
{{- define "baton.hookPodLabels" -}}
{{- merge (include "baton.hookLabels" . | fromYaml) .Values.podLabels | toYaml }}
{{- end }}

{{/* The pod's spec. Takes root, name, script, env. */}}
{{- define "baton.hookPod" -}}
restartPolicy: Never
serviceAccountName: {{ .name }}
automountServiceAccountToken: true
enableServiceLinks: true
securityContext: {{- include "baton.podSecurityContext" .root | nindent 2 }}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .root.Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{/* Of affinity what is about nodes: operators that keep apart from one another would keep hooks out of the nodes that they are on. */}}
{{- with (.root.Values.affinity | default dict).nodeAffinity }}
affinity:
  nodeAffinity: {{- toYaml . | nindent 4 }}
{{- end }}
{{- with .root.Values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .root.Values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
containers:
  - name: hook
    image: {{ include "baton.image" .root }}
    imagePullPolicy: {{ .root.Values.image.pullPolicy }}
    command: [python3, /scripts/{{ .script }}]
    env:
      - {name: PYTHONPATH, value: /scripts}
      - {name: PYTHONDONTWRITEBYTECODE, value: "1"}
      {{- range $name, $value := .env }}
      - name: {{ $name }}
        value: {{ $value | toString | quote }}
      {{- end }}
    securityContext: {{- include "baton.securityContext" .root | nindent 6 }}
    {{- with .root.Values.resources }}
    resources: {{- toYaml . | nindent 6 }}
    {{- end }}
    volumeMounts:
      - {name: scripts, mountPath: /scripts, readOnly: true}
volumes:
  - name: scripts
    configMap:
      name: {{ .name }}
{{- end }}
