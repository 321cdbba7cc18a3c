#!/usr/bin/env bash
# The demo for a few steps twice: by `python vla.py`, and by `ray job submit` to a Ray head that this script starts on
# this machine and stops again.
#
#   bash ci/smoke_job.sh
#
# Leaves OUTPUT_DIR/direct, OUTPUT_DIR/job and the head's log. From the environment: MAX_TRAIN_STEPS, OUTPUT_DIR, PYTHON
# (one that has the packages of requirements.lock).
set -euo pipefail
cd "$(dirname "$0")/.."
if [ -z "${PYTHON:-}" ]; then
    make --silent setup
    PYTHON=$PWD/.venv/bin/python
fi
PYTHON=$("$PYTHON" -c 'import sys; print(sys.executable)') # absolute: the job starts in another folder
export MAX_TRAIN_STEPS=${MAX_TRAIN_STEPS:-20}
mkdir -p "${OUTPUT_DIR:=outputs/smoke_job}"
out=$(cd "$OUTPUT_DIR" && pwd)
export VLA_CACHE=${VLA_CACHE:-$PWD/.cache}
rm -rf "$out/direct" "$out/job"

trained() { # FOLDER: it holds a policy, a report, and the metrics of the last step
    if [ -f "$1/pretrained_model/model.safetensors" ] && [ -f "$1/report.html" ] &&
        tail -n 1 "$1/metrics.jsonl" | grep -q "\"step\": $MAX_TRAIN_STEPS,"; then return; fi
    echo "smoke: $1 holds no policy, or no report, of $MAX_TRAIN_STEPS steps" >&2
    return 1
}

echo "--- python vla.py"
# Not on a cluster that happens to run here.
RAY_ADDRESS=local "$PYTHON" vla.py --preset demo --output_dir "$out/direct"
trained "$out/direct"

echo "--- ray job submit"
temp=$(mktemp -d /tmp/ray-XXXXXX) # sockets live here: their paths may have about 100 characters
head_pid=
stop() {
    status=$?
    if [ -n "$head_pid" ]; then
        kill "$head_pid" 2>/dev/null && wait "$head_pid" || true
    fi
    rm -rf "$temp"
    exit $status
}
trap stop EXIT
trap 'exit 130' INT TERM
read -r gcs_port dashboard_port agent_port < <("$PYTHON" -c '
import socket
taken = [socket.socket() for _ in range(3)]
[s.bind(("127.0.0.1", 0)) for s in taken]
print(*(s.getsockname()[1] for s in taken))')
# Whoever can reach the head's port can run code: only who has the token may.
RAY_AUTH_MODE=token RAY_AUTH_TOKEN=$("$PYTHON" -c 'import secrets; print(secrets.token_hex(32))')
export RAY_AUTH_MODE RAY_AUTH_TOKEN RAY_USAGE_STATS_ENABLED=0
export RAY_ADDRESS=http://127.0.0.1:$dashboard_port
ray() { "$PYTHON" -m ray.scripts.scripts "$@"; }
# exec: the pid is the head's own. It is the only thing to stop, and it takes what it started along.
(RAY_ADDRESS="" exec "$PYTHON" -m ray.scripts.scripts start --head --block --node-ip-address 127.0.0.1 \
    --port "$gcs_port" --include-dashboard true --dashboard-host 127.0.0.1 --dashboard-port "$dashboard_port" \
    --dashboard-agent-listen-port "$agent_port" --num-cpus 4 --object-store-memory 1000000000 \
    --temp-dir "$temp") >"$out/head.log" 2>&1 &
head_pid=$!
for _ in $(seq 60); do
    ray job list >/dev/null 2>&1 && break
    kill -0 "$head_pid" 2>/dev/null || break
    sleep 1
done
ray job list >/dev/null || { tail -n 30 "$out/head.log" >&2; echo "smoke: the Ray head did not start" >&2; exit 1; }
# The job gets what a run on several nodes gets: the code, without outputs, data sets or secrets.
runtime_env=$("$PYTHON" -c 'import json; from vla_finetuning.run import cluster; print(json.dumps(cluster.runtime_env()))')
ray job submit --runtime-env-json "$runtime_env" -- env MAX_TRAIN_STEPS="$MAX_TRAIN_STEPS" VLA_CACHE="$VLA_CACHE" \
    "$PYTHON" vla.py --preset demo --output_dir "$out/job"
trained "$out/job"
echo "smoke: both runs trained $MAX_TRAIN_STEPS steps"
