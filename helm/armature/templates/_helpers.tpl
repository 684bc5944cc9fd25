{{- define "armature.name" -}}
{{- if contains "armature" .Release.Name }}{{ .Release.Name | trunc 40 | trimSuffix "-" }}{{ else }}{{ printf "%s-armature" .Release.Name | trunc 40 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "armature.serviceAccount" -}}
{{ .Values.serviceAccount.name | default (include "armature.name" .) }}
{{- end }}

{{- /* Whether PodMonitors are wanted and known. */ -}}
{{- define "armature.podMonitor" -}}
{{- if and .Values.metrics.podMonitor.enabled (.Capabilities.APIVersions.Has "monitoring.coreos.com/v1/PodMonitor") }}true{{ end }}
{{- end }}

{{- define "armature.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "armature.selector" -}}
app.kubernetes.io/name: armature
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/component: operator
{{- end }}

{{- define "armature.labels" -}}
{{ include "armature.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service | quote }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | quote }}
{{- end }}

{{- /* What the operator does in the namespaces it watches. It may grant only what it holds: the rules of routers and workers are among these. */ -}}
{{- define "armature.rules" -}}
- apiGroups: [armature.dev]
  resources: [modeldeployments, workerpools]
  verbs: [get, list, watch]
- apiGroups: [armature.dev]
  resources: [workerpools]
  verbs: [create, patch, delete]
- apiGroups: [armature.dev]
  resources: [modeldeployments/status, workerpools/status]
  verbs: [get, patch]
- apiGroups: [armature.dev]
  resources: [modeldeployments/finalizers, workerpools/finalizers]
  verbs: [update]
- apiGroups: [nvidia.com]
  resources: [dynamoworkermetadatas]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [nvidia.com]
  resources: [dynamoworkermetadatas/status]
  verbs: [get, patch]
- apiGroups: [apps]
  resources: [deployments]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [services, serviceaccounts]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [rbac.authorization.k8s.io]
  resources: [roles, rolebindings]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch]
- apiGroups: [discovery.k8s.io]
  resources: [endpointslices]
  verbs: [get, list, watch]
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [create, patch]
{{- end }}
