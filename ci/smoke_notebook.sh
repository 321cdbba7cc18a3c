#!/usr/bin/env bash
# README.ipynb from top to bottom with papermill: the demo preset, a few steps. Sets the project up first if need be.
#
#   bash ci/smoke_notebook.sh
#
# Leaves OUTPUT_DIR/README.ipynb, executed (also when a cell fails), and OUTPUT_DIR/run. Exit status 0 only when every
# cell ran and every cell tagged `figure` shows one. From the environment: MAX_TRAIN_STEPS, OUTPUT_DIR, PYTHON (one that
# has the packages of requirements.lock), NOTEBOOK.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ -z "${PYTHON:-}" ]; then
    make --silent setup
    PYTHON=$PWD/.venv/bin/python
fi
export MAX_TRAIN_STEPS=${MAX_TRAIN_STEPS:-20}
mkdir -p "${OUTPUT_DIR:=outputs/smoke_notebook}"
out=$(cd "$OUTPUT_DIR" && pwd)
notebook=${NOTEBOOK:-README.ipynb}
executed=$out/README.ipynb
rm -rf "$executed" "$out/run"

"$PYTHON" ci/check_notebook.py "$notebook"
# The kernel is this very Python whatever kernels the machine has: the name python3 always means papermill's own.
"$PYTHON" -m papermill "$notebook" "$executed" --kernel python3 --language python --cwd . \
    --log-output --no-progress-bar --parameters_raw preset demo --parameters_raw output_dir "$out/run"
"$PYTHON" ci/check_notebook.py --executed "$executed"
echo "executed notebook: $executed"
