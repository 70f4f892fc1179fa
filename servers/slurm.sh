#!/usr/bin/env bash
#SBATCH --job-name=agentloop
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --signal=B:TERM@120
# A Ray cluster over the nodes of a Slurm job, and agentloop on the first: docs/guides/cluster.md.
# usage: sbatch servers/slurm.sh [options of `agentloop serve`]; default: --config servers/cluster.yaml
# The job inherits the environment of sbatch, with AGENTLOOP_KEY and AGENTLOOP_ADMIN_KEY. RUNS is a folder on each node's
# local disk, with the same path on all nodes; it must not be on a shared file system.
set -euo pipefail
: "${AGENTLOOP_KEY:?}" "${AGENTLOOP_ADMIN_KEY:?}"
(($#)) || set -- --config servers/cluster.yaml
port=${RAY_PORT:-6379}
runs=${RUNS:-${TMPDIR:-/tmp}/agentloop-runs}

export RAY_AUTH_MODE=token RAY_worker_niceness=0 RAY_USAGE_STATS_ENABLED=0 RAY_SERVE_CONTROL_LOOP_INTERVAL_S=0.5
RAY_AUTH_TOKEN=${RAY_AUTH_TOKEN:-$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')}
export RAY_AUTH_TOKEN

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${nodes[0]}
step=(srun --overlap --nodes=1 --ntasks=1) # it has all of a node, and others beside it

steps=()
trap 'kill "${steps[@]}" 2>/dev/null || true' EXIT
ray_on() {
  "${step[@]}" --nodelist="$1" env -u AGENTLOOP_KEY -u AGENTLOOP_ADMIN_KEY ray start --block "${@:2}" &
  steps+=($!)
}
ray_on "$head" --head --port="$port" --include-dashboard=false
for node in "${nodes[@]:1}"; do
  ray_on "$node" --address="$head:$port"
done

# What is deployed on one node stays on it: all are awaited.
"${step[@]}" --nodelist="$head" python -c "
import time, ray
for _ in range(300):
    try:
        ray.init('auto', log_to_driver=False, logging_level='ERROR')
        if sum(node['Alive'] for node in ray.nodes()) >= ${#nodes[@]}:
            break
    except ConnectionError:
        pass
    ray.shutdown()
    time.sleep(2)
else:
    raise SystemExit('not all of ${#nodes[@]} nodes joined within 10 minutes')
"

"${step[@]}" --nodelist="$head" agentloop serve --address auto --out "$runs" "$@" &
serve=$!
trap 'kill -TERM "$serve" 2>/dev/null || true' TERM INT # srun passes it on: running trajectories have --grace-s
while kill -0 "$serve" 2>/dev/null; do
  wait "$serve" || true # a signal ends this wait too
done
wait "$serve"
