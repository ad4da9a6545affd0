#!/usr/bin/env bash
# A run on several machines without a scheduler: the same command on each of them.
#
#   launch/multinode.sh NODES HEAD[:PORT] cfg.py [--actor.optim.lr 1e-6 ...]
#
# NODES is how many machines there are, HEAD one that all of them reach (port 29400 by default).
# The run folder must be on a file system that all share. RANKS_PER_NODE: default, one per GPU.
set -euo pipefail

if [ $# -lt 3 ]; then
    sed -n '2,7s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
nodes=$1 head=$2 config=$3
shift 3
case $head in *:*) ;; *) head=$head:29400 ;; esac
if [ -z "${RANKS_PER_NODE:-}" ]; then
    RANKS_PER_NODE=$({ nvidia-smi -L || true; } 2>/dev/null | wc -l)
    if [ "$RANKS_PER_NODE" -eq 0 ]; then
        echo "no GPU here; set RANKS_PER_NODE for a run on CPUs" >&2
        exit 2
    fi
fi

# Without it the ranks of a restarted job read the addresses of those before them.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}

exec torchrun \
    --nnodes "$nodes" --nproc-per-node "$RANKS_PER_NODE" \
    --rdzv-backend c10d --rdzv-endpoint "$head" --rdzv-id "spmdrl-$head" \
    -m spmdrl.ppo --config "$config" "$@"
