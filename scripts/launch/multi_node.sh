#!/usr/bin/env bash
# Run a script on several nodes with torchrun, by hand: start this once on every node, with the same arguments.
#
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=node0 scripts/launch/multi_node.sh benchmarks/benchmark_ddp.py     # on node0
#   NNODES=2 NODE_RANK=1 MASTER_ADDR=node0 scripts/launch/multi_node.sh benchmarks/benchmark_ddp.py     # on node1
#
# Environment:
#   NNODES          number of nodes (required)
#   MASTER_ADDR     a name or address of the first node that all others reach (required)
#   MASTER_PORT     a port that is free there (29500)
#   NPROC_PER_NODE  ranks per node: a number, or "gpu" for one per GPU (gpu)
#   RENDEZVOUS      static: every node is told its number in NODE_RANK; a node that is lost ends the run (default)
#                   c10d: nodes find their numbers, and come back after a failure up to MAX_RESTARTS times (0)
#   RUN_ID          c10d: a name that all nodes share and no other run has at the same time (cs336)
#   TORCHRUN        how torchrun is called, in words ("uv run torchrun"); torchrun if unset
#
# A restart begins the script anew; what it had computed is lost unless it wrote checkpoints.
# If nodes have several networks, name the one to use: NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME.
set -euo pipefail

: "${NNODES:?NNODES is not set: the number of nodes}"
: "${MASTER_ADDR:?MASTER_ADDR is not set: the address of the first node}"
if (($# == 0)); then
    echo "multi_node.sh: nothing to run; give a script and its arguments" >&2
    exit 2
fi
port=${MASTER_PORT:-29500}
read -r -a torchrun <<<"${TORCHRUN:-torchrun}"
arguments=(--nnodes "$NNODES" --nproc-per-node "${NPROC_PER_NODE:-gpu}" --max-restarts "${MAX_RESTARTS:-0}")

case "${RENDEZVOUS:-static}" in
    static)
        : "${NODE_RANK:?NODE_RANK is not set: the number of this node, 0 on the one at MASTER_ADDR}"
        arguments+=(--rdzv-backend static --node-rank "$NODE_RANK")
        arguments+=(--master-addr "$MASTER_ADDR" --master-port "$port")
        ;;
    c10d)
        arguments+=(--rdzv-backend c10d --rdzv-id "${RUN_ID:-cs336}" --rdzv-endpoint "$MASTER_ADDR:$port")
        ;;
    *)
        echo "multi_node.sh: RENDEZVOUS must be static or c10d, got '$RENDEZVOUS'" >&2
        exit 2
        ;;
esac
if [[ -n ${SLURM_STEP_ID:-} ]]; then
    # Slurm sends SIGTERM to each process of a step: ranks may save and end, if torchrun neither ends them nor itself.
    trap '' TERM
    arguments+=(--signals-to-handle SIGINT)
fi
exec "${torchrun[@]}" "${arguments[@]}" -- "$@"
