#!/bin/sh
# Writes the plain manifests from the Helm charts with their default values: render.sh [FOLDER].
# For people who use kustomize. Change the charts, not the manifests.
set -eu
charts=$(cd "$(dirname "$0")/../helm" && pwd)
out=${1:-$(cd "$(dirname "$0")" && pwd)}
helm=${HELM:-helm}
mkdir -p "$out/lighthouse" "$out/prometheus-operator" "$out/training-job"
"$helm" template lighthouse "$charts/lighthouse" -n ftcore --set serviceMonitor.enabled=false \
    >"$out/lighthouse/lighthouse.yaml"
"$helm" template lighthouse "$charts/lighthouse" -n ftcore -s templates/servicemonitor.yaml \
    >"$out/prometheus-operator/servicemonitor.yaml"
"$helm" template llm "$charts/training-job" -n train --set podMonitor.enabled=false \
    >"$out/training-job/job.yaml"
