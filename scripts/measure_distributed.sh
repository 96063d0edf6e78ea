#!/usr/bin/env bash
# Measure what profiles/results/<gpu>/ and profiles/digests/<gpu>/ hold for several GPUs of one host.
#
#   scripts/measure_distributed.sh FOLDER PART...    # parts: collectives ddp sharded-optimizer fsdp traces fsdp-leaderboard
#
# RANKS names the worlds (default: 2 4), TORCHRUN the launcher (default: uv run torchrun). Between two H200s collectives
# take half a minute, ddp about ten minutes (five were measured with half the steps), the others one to four. Each part
# appends to its own folder below FOLDER; uv run scripts/report.py --adopt FOLDER moves rows and pictures to profiles/.
# Run autocast cells on a host that does nothing else: they wait for launches.
set -euo pipefail
folder=${1:?usage: scripts/measure_distributed.sh FOLDER PART...}
shift
read -r -a torchrun <<<"${TORCHRUN:-uv run torchrun}"
read -r -a worlds <<<"${RANKS:-2 4}"
ranks() { "${torchrun[@]}" --standalone --nproc-per-node "$@" --format csv --out "$folder/$part"; }

for part in "$@"; do
  case "$part" in
    collectives)
      for n in "${worlds[@]}"; do ranks "$n" benchmarks/benchmark_collectives.py --dtype fp32 bf16; done ;;
    ddp)
      ranks 1 benchmarks/benchmark_ddp.py --size xl --dtype fp32 autocast-bf16 --ddp bucketed torch --warmup 3 --steps 8
      for n in "${worlds[@]}"; do
        ranks "$n" benchmarks/benchmark_ddp.py --size xl 2.7b --dtype fp32 autocast-bf16 --warmup 3 --steps 8
      done
      ranks "${worlds[0]}" benchmarks/benchmark_ddp.py --size xl --ddp bucketed --bucket-size-mb 1 10 100 1000 \
        --warmup 3 --steps 8 ;;
    sharded-optimizer)
      ranks "${worlds[0]}" benchmarks/benchmark_sharded_optimizer.py --size xl 2.7b --repeat 2 ;;
    fsdp)
      for n in "${worlds[@]}"; do ranks "$n" benchmarks/benchmark_fsdp.py --size xl --dtype fp32 bf16-compute; done
      ranks "${worlds[0]}" benchmarks/benchmark_fsdp.py --size xl --fsdp ours --prefetch 0 2
      ranks "${worlds[0]}" benchmarks/benchmark_fsdp.py --size 2.7b --warmup 2 --steps 5 ;;
    traces)
      ranks "${worlds[0]}" benchmarks/benchmark_ddp.py --size xl --ddp naive overlapped bucketed --warmup 1 --steps 2 \
        --trace "$folder/ddp"
      ranks "${worlds[0]}" benchmarks/benchmark_fsdp.py --size xl --fsdp ours torch --warmup 1 --steps 2 \
        --trace "$folder/fsdp" ;;
    fsdp-leaderboard)
      for side in "ours torch --attention hopper" "torch --attention sdpa-cudnn"; do
        read -r -a implementations <<<"$side"
        ranks "${worlds[0]}" benchmarks/benchmark_fsdp.py --size leaderboard-8b --context-length 32768 --batch-size 1 \
          --dtype bf16-compute --checkpoint full --compile --warmup 1 --steps 2 --fsdp "${implementations[@]}"
      done ;;
    *)
      echo "unknown part '$part': parts are collectives, ddp, sharded-optimizer, fsdp, traces and fsdp-leaderboard" >&2
      exit 2 ;;
  esac
done
