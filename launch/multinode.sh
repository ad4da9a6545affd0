#!/usr/bin/env bash
# A run on several machines without a scheduler: the same command on each of them, in any order.
#
#   launch/multinode.sh NODES HEAD[:PORT] cfg.py [--actor.optim.lr 1e-6 ...]
#
# NODES is how many machines there are, or MIN:MAX for a job that loses and gains some of them
# (docs/elastic.md; it needs MAX_RESTARTS=1 or more). HEAD is one that all of them reach (port
# 29400 by default).
# The run folder must be on a file system that all share. Settings, from the environment:
#   RANKS_PER_NODE  default: one per GPU
#   SPMDRL_PROGRAM  what runs, default spmdrl.ppo; spmdrl.sft, spmdrl.preference, spmdrl.reward_model
#   MAX_RESTARTS    failures of ranks after which all ranks are started again, default 0
#   RDZV_ID         the job's name at its rendezvous, default spmdrl-HEAD: another one for each job
#                   where HEAD keeps its store from job to job
#   GRACE_S         seconds a step and its checkpoint may take after SIGTERM or Ctrl-C, default 25
#   LOG_DIR         for a file per rank and stream in LOG_DIR/<host>/; default: none
#
# Exit codes: 0 done; 1 a failure, 75 stopped by a signal after a checkpoint: the same command on
# all machines with --resume auto goes on; 2 a mistake in the config or the data.
set -euo pipefail

if [ $# -lt 3 ]; then
    sed -n '2,19s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
nodes=$1 head=$2 config=$3
shift 3
case $head in *:*) ;; *) head=$head:29400 ;; esac
if [ -z "${RANKS_PER_NODE:-}" ]; then
    # a GPU that is cut (MIG) has a line for each part too
    RANKS_PER_NODE=$({ nvidia-smi -L || true; } 2>/dev/null | grep -c ^GPU || true)
    if [ "$RANKS_PER_NODE" -eq 0 ]; then  # AMD's tool prints several lines for each GPU
        gpus=$({ rocm-smi --showid || true; } 2>/dev/null | sed -n 's/^\(GPU\[[0-9]*\]\).*/\1/p')
        RANKS_PER_NODE=$(printf '%s' "$gpus" | sort -u | grep -c . || true)
    fi
    if [ "$RANKS_PER_NODE" -eq 0 ]; then
        echo "no GPU here; set RANKS_PER_NODE for a run on CPUs" >&2
        exit 2
    fi
fi
grace_s=${GRACE_S:-25}
log_options=()
if [ -n "${LOG_DIR:-}" ]; then
    log_options=(--log-dir "$LOG_DIR/$(hostname)" --tee 3)
fi

# Without it the ranks of a restarted job read the addresses of those before them.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}
export PYTHONUNBUFFERED=1
export TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE="\${rank}: "

exec python -m spmdrl.launch \
    --nnodes "$nodes" --nproc-per-node "$RANKS_PER_NODE" --max-restarts "${MAX_RESTARTS:-0}" \
    --rdzv-backend c10d --rdzv-endpoint "$head" --rdzv-id "${RDZV_ID:-spmdrl-$head}" \
    --shutdown-timeout $((${grace_s%.*} + 20)) "${log_options[@]}" \
    -m "${SPMDRL_PROGRAM:-spmdrl.ppo}" --config "$config" --checkpoint.grace_s "$grace_s" "$@"
