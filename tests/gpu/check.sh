#!/usr/bin/env bash
# On a host with an NVIDIA GPU and the vLLM lane: the engine contract on the GPU; a rollout with an update, its logprobs
# recomputed with transformers; exact continuation after updates over CUDA IPC and, with two GPUs, over NCCL; sleep
# and wake around training steps. About 9 minutes.
#   tests/gpu/check.sh [run directory]
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${1:-runs}
mkdir -p "$out"
python3 -m pytest -q -m engine tests/contract -o filterwarnings=default -p no:cacheprovider
python3 -m agentloop_servers.cli rollout --config servers/standalone.yaml \
    --tasks examples/data/tasks.jsonl --samples 8 --push examples/tiny_policy/v1 --push-version 1 --out "$out"
python3 -m tests.gpu.recompute "$out/latest/trajectories.parquet"
python3 -m tests.gpu.continuation --transport ipc --out "$out/continuation-ipc.json"
if [ "$(nvidia-smi --list-gpus | wc -l)" -ge 2 ]; then
    python3 -m tests.gpu.continuation --transport nccl --out "$out/continuation-nccl.json"
fi
python3 -m tests.gpu.hybrid_cycle --shape small --kv-gib 8 --out "$out/hybrid-small.json"
