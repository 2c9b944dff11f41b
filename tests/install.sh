#!/bin/sh
# Makes the virtual environment $1 with ftcore and its test tools. torch is pinned in constraints.txt.
set -eu
venv=$1
if ! python3 -m venv "$venv" 2>/dev/null; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        apt-get update -qq && apt-get install -y -qq python3-venv >/dev/null
        python3 -m venv "$venv"
    else
        echo "python3 cannot make a virtual environment here. Install it with: sudo apt-get install python3-venv" >&2
        exit 1
    fi
fi
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check torch -c tests/constraints.txt
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check -e '.[dev]' -c tests/constraints.txt
