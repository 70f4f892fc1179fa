#!/usr/bin/env bash
# On a host with an NVIDIA GPU and the vLLM lane: the engine contract on the GPU, then a rollout with an update.
# Logprobs of that rollout are recomputed with transformers. About 5 minutes.
#   tests/gpu/check.sh [run directory]
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${1:-runs}
python3 -m pytest -q -m engine tests/contract -o filterwarnings=default -p no:cacheprovider
python3 -m agentloop_servers.cli rollout --config servers/standalone.yaml \
    --tasks examples/data/tasks.jsonl --samples 8 --push examples/tiny_policy/v1 --push-version 1 --out "$out"
python3 -m tests.gpu.recompute "$out/latest/trajectories.parquet"
