#!/usr/bin/env bash
#SBATCH --job-name=cs336-systems
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=00:30:00
#SBATCH --output=%x-%j.log
#
# Run a script on several nodes under Slurm: one task per node, each a torchrun agent. From the project's root:
#
#   sbatch scripts/launch/slurm.sh benchmarks/benchmark_ddp.py --size xl --out results/
#   sbatch --nodes 4 --gpus-per-node 4 scripts/launch/slurm.sh benchmarks/benchmark_fsdp.py
#
# Options before this file's name are sbatch's and override those above. NPROC_PER_NODE, TORCHRUN and MAX_RESTARTS are
# those of multi_node.sh. Nodes meet at the first one, at a port that follows from the job's number, so that two jobs
# there do not meet each other. scancel and the time limit end every rank: Slurm kills the whole step.
set -euo pipefail

: "${SLURM_JOB_ID:?this is a batch script: sbatch scripts/launch/slurm.sh SCRIPT [ARGUMENTS]}"
# sbatch runs a copy of this file from its spool; the recipe beside it is found from where the job was submitted.
recipe=${SLURM_SUBMIT_DIR:?}/scripts/launch/multi_node.sh
read -r first_node < <(scontrol show hostnames "$SLURM_JOB_NODELIST")

export NNODES=$SLURM_JOB_NUM_NODES MASTER_ADDR=$first_node MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
export RENDEZVOUS=c10d RUN_ID=$SLURM_JOB_ID
srun --kill-on-bad-exit=1 bash "$recipe" "$@"
