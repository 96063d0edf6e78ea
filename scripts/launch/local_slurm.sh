#!/usr/bin/env bash
# Run Slurm on this machine alone, as a cluster of NODES nodes, to try scripts/launch/slurm.sh before a real one has it.
# Debian or Ubuntu, as root. The nodes' names are added to /etc/hosts; no other Slurm may run here.
#
#   scripts/launch/local_slurm.sh start     # installs slurmctld, slurmd and munge if they are missing; waits until idle
#   export SLURM_CONF=/tmp/local_slurm/slurm.conf NPROC_PER_NODE=1
#   sbatch --gpus-per-node 0 --cpus-per-task 1 scripts/launch/slurm.sh ...
#   scripts/launch/local_slurm.sh stop
#
# Environment:
#   NODES    number of nodes (2); they are called node1, node2, ... and all are this machine
#   FOLDER   configuration, state and logs of the daemons (/tmp/local_slurm)
set -euo pipefail

nodes=${NODES:-2}
folder=${FOLDER:-/tmp/local_slurm}
export SLURM_CONF=$folder/slurm.conf

stop() {
    for file in "$folder"/*.pid /run/munge/munged.pid; do
        if [[ -e $file ]]; then kill "$(<"$file")" || true; fi
    done
}

start() {
    if ! command -v slurmctld slurmd munged sbatch >/dev/null; then
        apt-get update -qq
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends slurmctld slurmd slurm-client munge
    fi
    mkdir -p "$folder"/state /run/munge
    chown munge: /run/munge
    runuser -u munge -- munged
    ((cpus = $(nproc) / nodes)) || cpus=1
    cat >"$SLURM_CONF" <<CONF
ClusterName=local
SlurmctldHost=$(hostname)
SlurmUser=root
AuthType=auth/munge
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool-%n
SlurmdPidFile=$folder/%n.pid
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdLogFile=$folder/%n.log
SlurmctldLogFile=$folder/slurmctld.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
ReturnToService=2
MpiDefault=none
NodeName=node[1-$nodes] NodeHostname=$(hostname) NodeAddr=127.0.0.1 Port=[17001-$((17000 + nodes))] CPUs=$cpus State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
CONF
    for ((node = 1; node <= nodes; node++)); do
        grep -qw "node$node" /etc/hosts || echo "127.0.0.1 node$node" >>/etc/hosts
    done
    slurmctld
    for ((node = 1; node <= nodes; node++)); do
        slurmd -N "node$node"
    done
    for ((second = 0; second < 30; second++)); do
        [[ $(sinfo --noheader --Node --format %T | sort -u) == idle ]] && break
        sleep 1
    done
    sinfo
}

case "${1:-}" in
    start | stop) "$1" ;;
    *)
        echo "local_slurm.sh: start or stop, got '${1:-}'" >&2
        exit 2
        ;;
esac
