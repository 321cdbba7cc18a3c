#!/usr/bin/env bash
# What build.yaml runs in an Anyscale workspace: the notebook's smoke run on a cluster whose head runs no tasks.
# The image has Ray; Anyscale installs on the workers what is installed here, and mounts this folder on all nodes.
set -eu
cd "$(dirname "$0")/.."
shared=${SHARED:-/mnt/cluster_storage}/vla-fine-tuning
python -m pip install --no-deps --require-hashes -r requirements.lock
mkdir -p "$shared"
PYTHON=python VLA_CACHE="$shared/cache" OUTPUT_DIR="$shared/smoke" bash ci/smoke_notebook.sh
