{{- define "training-job.pod" -}}
{{- $v := .root.Values -}}
{{- $name := printf "%s-group-%d-0" .root.Release.Name .group -}}
restartPolicy: Never
enableServiceLinks: false
automountServiceAccountToken: false  # neither trainer nor daemon speaks with the API
shareProcessNamespace: true  # the daemon sees which trainer it serves
terminationGracePeriodSeconds: {{ $v.terminationGracePeriodSeconds }}
{{- with $v.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with $v.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $v.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: {{ $v.runAsUser }}
  fsGroup: {{ $v.runAsUser }}
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- if $v.checkpoint.enabled }}
initContainers:
  # A sidecar (restartPolicy Always): it starts before the trainer and ends after it.
  - name: checkpoint
    image: {{ $v.image }}
    imagePullPolicy: {{ $v.imagePullPolicy }}
    restartPolicy: Always
    command: [python, -m, ckpt.daemon]
    args:
      - --linger-s={{ $v.checkpoint.lingerSeconds }}
      - --niceness={{ $v.checkpoint.niceness }}
      - --metrics-address=0.0.0.0:{{ $v.checkpoint.metricsPort }}
    env:
      - {name: CKPT_RUNTIME_DIR, value: /run/ftcore/ckpt}
    ports:
      - {name: ckpt-metrics, containerPort: {{ $v.checkpoint.metricsPort }}, protocol: TCP}
    resources: {{- toYaml $v.checkpoint.resources | nindent 6 }}
    securityContext:
      allowPrivilegeEscalation: false
      readOnlyRootFilesystem: true
      capabilities: {drop: [ALL]}
    volumeMounts:
      - {name: shm, mountPath: /dev/shm}
      - {name: run, mountPath: /run/ftcore}
      - {name: tmp, mountPath: /tmp}
      {{- if $v.checkpoint.claimName }}
      - {name: checkpoints, mountPath: /checkpoints}
      {{- end }}
{{- end }}
containers:
  - name: trainer
    image: {{ $v.image }}
    imagePullPolicy: {{ $v.imagePullPolicy }}
    command:
      - torchrun
      - --nnodes={{ .pods }}
      - --nproc-per-node={{ $v.ranksPerPod }}
      - --node-rank=$(JOB_COMPLETION_INDEX)
      - --master-addr={{ $name }}-0.{{ .root.Release.Name }}
      - --master-port=29500
      - --max-restarts=0  # one rank lost is the group lost; JobSet brings it back
    args: {{- toYaml $v.script | nindent 6 }}
    env:
      - name: JOB_COMPLETION_INDEX
        valueFrom: {fieldRef: {fieldPath: "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
      # Keeps host memory flat over many rebuilt NCCL communicators: see GPU.md.
      - {name: MALLOC_ARENA_MAX, value: "2"}
      - {name: NCCL_RAS_ENABLE, value: "0"}
      - name: FTCORE_HOST
        valueFrom: {fieldRef: {fieldPath: status.podIP}}
      - {name: FTCORE_JOB, value: {{ .root.Release.Name }}}
      - {name: FTCORE_REPLICA_ID, value: group-{{ .group }}}
      - {name: FTCORE_LIGHTHOUSE, value: {{ $v.lighthouse | quote }}}
      {{- if $v.tls.enabled }}
      - {name: FTCORE_TLS_CA, value: /tls/ca/ca.crt}
      {{- if $v.tls.clientSecretName }}
      - {name: FTCORE_TLS_CERT, value: /tls/client/tls.crt}
      - {name: FTCORE_TLS_KEY, value: /tls/client/tls.key}
      {{- end }}
      {{- end }}
      {{- if $v.token.secretName }}
      - {name: FTCORE_TOKEN_FILE, value: /token/token}
      {{- end }}
      - {name: CKPT_RUNTIME_DIR, value: /run/ftcore/ckpt}
      {{- with $v.env }}{{ toYaml . | nindent 6 }}{{ end }}
    {{- with $v.envFrom }}
    envFrom: {{- toYaml . | nindent 6 }}
    {{- end }}
    resources: {{- toYaml $v.resources | nindent 6 }}
    securityContext:
      allowPrivilegeEscalation: false
      readOnlyRootFilesystem: true
      capabilities: {drop: [ALL]}
    volumeMounts:
      - {name: shm, mountPath: /dev/shm}
      - {name: run, mountPath: /run/ftcore}
      - {name: tmp, mountPath: /tmp}
      {{- if $v.checkpoint.claimName }}
      - {name: checkpoints, mountPath: /checkpoints}
      {{- end }}
      {{- if $v.tls.enabled }}
      - {name: ca, mountPath: /tls/ca, readOnly: true}
      {{- if $v.tls.clientSecretName }}
      - {name: client, mountPath: /tls/client, readOnly: true}
      {{- end }}
      {{- end }}
      {{- if $v.token.secretName }}
      - {name: token, mountPath: /token, readOnly: true}
      {{- end }}
volumes:
  - name: shm
    emptyDir: {medium: Memory, sizeLimit: {{ $v.sharedMemory }}}
  - name: run
    emptyDir: {medium: Memory, sizeLimit: 16Mi}
  - name: tmp
    emptyDir: {}
  {{- if $v.checkpoint.claimName }}
  - name: checkpoints
    persistentVolumeClaim: {claimName: {{ $v.checkpoint.claimName }}}
  {{- end }}
  {{- if $v.tls.enabled }}
  - name: ca
    secret:
      secretName: {{ $v.tls.caSecretName }}
      items: [{key: ca.crt, path: ca.crt}]
      defaultMode: 0440
  {{- if $v.tls.clientSecretName }}
  - name: client
    secret: {secretName: {{ $v.tls.clientSecretName }}, defaultMode: 0440}
  {{- end }}
  {{- end }}
  {{- if $v.token.secretName }}
  - name: token
    secret: {secretName: {{ $v.token.secretName }}, defaultMode: 0440}
  {{- end }}
{{- end }}
