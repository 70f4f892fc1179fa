#!/usr/bin/env bash
# Checks and measures one engine lane on the GPUs of this host: `tests/gpu/run.sh vllm` or `tests/gpu/run.sh sglang`.
# Within 9 minutes on one GPU; parts, options and where the results go: tests/gpu/run.py (`--help`).
set -euo pipefail
cd "$(dirname "$0")/../.."
export PYTHONPATH="$PWD:$PWD/servers:$PWD/tools${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-python3}" -m tests.gpu.run "$@"
