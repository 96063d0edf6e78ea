#!/usr/bin/env bash
#SBATCH --job-name=cs336-systems
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=00:30:00
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@180
#
# Run a script on several nodes under Slurm: one task per node, each a torchrun agent. From the project's root:
#
#   sbatch scripts/launch/slurm.sh benchmarks/benchmark_ddp.py --size xl --out results/
#   sbatch --nodes 4 --gpus-per-node 4 scripts/launch/slurm.sh benchmarks/benchmark_fsdp.py
#
# Options before this file's name are sbatch's and override those above. NPROC_PER_NODE, TORCHRUN and MAX_RESTARTS are
# those of multi_node.sh. Nodes meet at the first one, at a port that follows from the job's number, so that two jobs
# there do not meet each other.
#
# Three minutes before the time limit (Slurm may be a minute early) ranks get SIGTERM: train.py finishes its step, saves
# and ends with 0, the job goes back into the queue, and goes on from there. By hand:
#
#   scancel --signal USR1 --batch JOB    # the same: save, end, queue again
#   scancel --signal TERM JOB            # save and end
#   scancel JOB                          # the same within Slurm's KillWait, mostly 30 s
set -euo pipefail

: "${SLURM_JOB_ID:?this is a batch script: sbatch scripts/launch/slurm.sh SCRIPT [ARGUMENTS]}"
# sbatch runs a copy of this file from its spool; the recipe beside it is found from where the job was submitted.
recipe=${SLURM_SUBMIT_DIR:?}/scripts/launch/multi_node.sh
read -r first_node < <(scontrol show hostnames "$SLURM_JOB_NODELIST")

export NNODES=$SLURM_JOB_NUM_NODES MASTER_ADDR=$first_node MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
export RENDEZVOUS=c10d RUN_ID=$SLURM_JOB_ID
again=
trap 'again=yes; scancel --signal TERM "$SLURM_JOB_ID"' USR1
srun --kill-on-bad-exit=1 bash "$recipe" "$@" &
code=0
wait $! || code=$?
if [[ $again ]]; then # the signal has ended the wait, not srun
    code=0
    wait $! || code=$?
fi
if [[ $again && $code == 0 ]]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
