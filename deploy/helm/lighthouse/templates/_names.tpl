{{- define "lighthouse.selector" -}}
app.kubernetes.io/name: lighthouse
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}
{{- define "lighthouse.labels" -}}
{{ include "lighthouse.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: ftcore
ftcore.dev/part: lighthouse
{{- end }}
{{- define "lighthouse.image" -}}
{{ .Values.image.repository }}{{ if .Values.image.digest }}@{{ .Values.image.digest }}{{ else }}:{{ .Values.image.tag | default .Chart.AppVersion }}{{ end }}
{{- end }}
{{- define "lighthouse.probe" -}}
{{- if and .root.Values.tls.enabled .root.Values.tls.mutual -}}
tcpSocket: {port: main}  # the kubelet has no client certificate
{{- else -}}
httpGet: {path: {{ .path }}, port: main, scheme: {{ ternary "HTTPS" "HTTP" .root.Values.tls.enabled }}}
{{- end }}
{{- end }}
