{{/* Names, labels and sizes that several templates share. */}}

{{- define "slotcar.name" -}}
{{- .Values.name | default (printf "%s-injector" .Release.Name) | trunc 50 | trimSuffix "-" -}}
{{- end }}

{{- define "slotcar.selector" -}}
app.kubernetes.io/name: slotcar-injector
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{/* (list $ MORE): without those that the injector's pods are found by. */}}
{{- define "slotcar.ownLabels" -}}
{{- with first . -}}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: slotcar
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}
{{- with merge (dict) (last .) (first .).Values.labels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "slotcar.labels" -}}
{{ include "slotcar.selector" . }}
{{ include "slotcar.ownLabels" (list . dict) }}
{{- end }}

{{/* (list $ MORE): with more labels, which count before those of all objects. */}}
{{- define "slotcar.labelsAnd" -}}
{{ include "slotcar.selector" (first .) }}
{{ include "slotcar.ownLabels" . }}
{{- end }}

{{- define "slotcar.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- .Values.serviceAccount.name | default (include "slotcar.name" .) -}}
{{- else -}}
{{- .Values.serviceAccount.name | default "default" -}}
{{- end -}}
{{- end }}

{{/* Each mode has a Secret of its own, so that a change of mode takes none from its owner. */}}
{{- define "slotcar.secret" -}}
{{- if eq .Values.tls.mode "provided" -}}
{{- .Values.tls.provided.secretName -}}
{{- else if eq .Values.tls.mode "certManager" -}}
{{- include "slotcar.name" . }}-tls
{{- else -}}
{{- include "slotcar.name" . }}-generated
{{- end -}}
{{- end }}

{{- define "slotcar.dnsName" -}}
{{- printf "%s.%s.svc" (include "slotcar.name" .) .Release.Namespace -}}
{{- end }}

{{- define "slotcar.dnsNames" -}}
{{- $base := include "slotcar.dnsName" . -}}
{{- list $base (printf "%s.cluster.local" $base) (trimSuffix ".svc" $base) | toJson -}}
{{- end }}

{{/* (dict "image" IMAGE "tag" VERSION): what a container has as its image. */}}
{{- define "slotcar.image" -}}
{{- if .image.digest -}}
{{- printf "%s@%s" .image.repository .image.digest -}}
{{- else -}}
{{- printf "%s:%s" .image.repository (.image.tag | default .tag) -}}
{{- end -}}
{{- end }}

{{/* Namespaces whose pods get nothing, as JSON. */}}
{{- define "slotcar.leftOut" -}}
{{- concat (list .Release.Namespace "kube-system" "kube-node-lease" "kube-public") .Values.webhook.leaveOut | uniq | toJson -}}
{{- end }}

{{/* All bodies that are read at a time, and 384Mi for the process and the one review that it decides. */}}
{{- define "slotcar.memoryLimit" -}}
{{- $bodies := mul (int64 .Values.serving.mostRequests) (int64 .Values.serving.bodyBytes) -}}
{{- printf "%dMi" (add 384 (div (add $bodies 1048575) 1048576)) -}}
{{- end }}

{{/* What the restricted Pod Security Standard wants, and a root file system that is read-only. */}}
{{- define "slotcar.containerSecurity" -}}
allowPrivilegeEscalation: false
capabilities:
  drop: [ALL]
readOnlyRootFilesystem: true
runAsNonRoot: true
{{- with .Values.runAsUser }}
runAsUser: {{ int64 . }}
runAsGroup: {{ int64 . }}
{{- end }}
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{/* Fails for values that do not go together, which the schema cannot say. */}}
{{- define "slotcar.check" -}}
{{- with .Values.tls.generated -}}
{{- if ge (int64 .renewDays) (int64 .days) -}}
{{- fail (printf "tls.generated.renewDays is %d, wanted less than tls.generated.days, %d" (int64 .renewDays) (int64 .days)) -}}
{{- end -}}
{{- end -}}
{{- with .Values.serving -}}
{{- if eq (int64 .port) (int64 .opsPort) -}}
{{- fail (printf "serving.opsPort is %d, wanted another than serving.port" (int64 .opsPort)) -}}
{{- end -}}
{{- end -}}
{{- end }}
