#!/bin/sh
# Everything on this machine: a lighthouse, three replica groups that train and are killed now and
# then, and Prometheus with the rules and alerts of this folder. Ends with Ctrl-C.
#
#   deploy/local.sh [SECONDS]
#
# LIGHTHOUSE_PORT (29510), PROMETHEUS_PORT (9090), GROUP_COUNT (3), KILL_EVERY_S (30; 0: never),
# FOLDER (a new one in TMPDIR, removed at the end), PYTHON (python3), PROMETHEUS (prometheus).
set -eu
here=$(cd "$(dirname "$0")" && pwd)
for_s=${1:-0}
lighthouse=127.0.0.1:${LIGHTHOUSE_PORT:-29510}
prometheus=127.0.0.1:${PROMETHEUS_PORT:-9090}
groups=${GROUP_COUNT:-3}
kill_every_s=${KILL_EVERY_S:-30}
python=${PYTHON:-python3}
program=${PROMETHEUS:-prometheus}
folder=${FOLDER:-$(mktemp -d)}
export PYTHONPATH="$here/..${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=1

if ! command -v "$program" >/dev/null; then
    echo "$program is not installed. Install it with: sudo apt-get install prometheus" >&2
    exit 1
fi

lighthouse_pid='' prometheus_pid=''
end() {
    trap - EXIT INT TERM
    # To trainers SIGTERM means to leave in good order, for which they would need the others.
    for file in "$folder"/*.pid; do
        [ ! -f "$file" ] || kill -9 "$(cat "$file")" 2>/dev/null || true
    done
    for pid in $prometheus_pid $lighthouse_pid; do
        kill "$pid" 2>/dev/null || true
        wait "$pid" 2>/dev/null || true
    done
    [ -n "${FOLDER:-}" ] || rm -rf "$folder"
}
trap end EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

wait_for() { # wait_for URL PID NAME
    tries=0
    until "$python" -c "import sys, urllib.request as r; r.urlopen(sys.argv[1], timeout=2)" "$1" \
        2>/dev/null; do
        tries=$((tries + 1))
        if ! kill -0 "$2" 2>/dev/null || [ "$tries" -gt 120 ]; then
            echo "$3 did not start:" >&2
            tail -n 5 "$folder/$3.log" >&2
            exit 1
        fi
        sleep 0.2
    done
}

start_group() { # start_group NUMBER
    FTCORE_LIGHTHOUSE=$lighthouse FTCORE_REPLICA_ID=r$1 FTCORE_JOB=demo FTCORE_HOST=127.0.0.1 \
        STEPS=1000000 STEP_S=0.1 SHARDS=$groups \
        "$python" "$here/example/train.py" >>"$folder/r$1.log" 2>&1 &
    echo $! >"$folder/r$1.pid"
}

mkdir -p "$folder"
"$python" -m lighthouse serve --bind "$lighthouse" --journal "$folder/journal" \
    >"$folder/lighthouse.log" 2>&1 &
lighthouse_pid=$!
wait_for "http://$lighthouse/healthz" "$lighthouse_pid" lighthouse

# The shipped configuration, but scraped every second and with the targets of this machine.
sed 's/_interval: 15s/_interval: 1s/' "$here/prometheus/prometheus.yml" >"$folder/prometheus.yml"
cp "$here/prometheus/rules.yml" "$here/prometheus/alerts.yml" "$folder/"
echo "[{\"targets\": [\"$lighthouse\"]}]" >"$folder/lighthouse.targets.json"
echo '[]' >"$folder/checkpoint.targets.json"
"$program" --config.file="$folder/prometheus.yml" --storage.tsdb.path="$folder/tsdb" \
    --web.listen-address="$prometheus" >"$folder/prometheus.log" 2>&1 &
prometheus_pid=$!
wait_for "http://$prometheus/-/ready" "$prometheus_pid" prometheus

number=0
while [ "$number" -lt "$groups" ]; do
    start_group "$number"
    number=$((number + 1))
done

cat <<EOF
lighthouse  http://$lighthouse/               (dashboard), /status, /interruptions, /metrics
prometheus  http://$prometheus/alerts         and /graph?g0.expr=ft:ettr:ratio_rate1h&g0.tab=0
grafana     import deploy/grafana/*.json, with this Prometheus as the data source
groups      r0 to r$((groups - 1)), logs in $folder
history     lighthouse history --lighthouse $lighthouse
EOF

passed=0 victim=0
while [ "$for_s" -eq 0 ] || [ "$passed" -lt "$for_s" ]; do
    sleep 1
    passed=$((passed + 1))
    if [ "$kill_every_s" -gt 0 ] && [ $((passed % kill_every_s)) -eq 0 ]; then
        echo "$(date +%T) kill -9 r$victim; back in 2 s"
        kill -9 "$(cat "$folder/r$victim.pid")" 2>/dev/null || true
        sleep 2
        passed=$((passed + 2))
        start_group "$victim"
        victim=$(((victim + 1) % groups))
    fi
done
