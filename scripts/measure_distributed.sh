#!/usr/bin/env bash
# Measure what profiles/results/<gpu>/ and profiles/digests/<gpu>/ hold for several GPUs of one host.
#
#   scripts/measure_distributed.sh FOLDER PART...
#
# Nothing else may run on the host. What is compared is measured by one command in two rounds, the second one backwards,
# each cell by five steps of warm-up and ten timed ones in each (by two and five where steps take five seconds and what
# is compared with them has a command of its own: fsdp-leaderboard, and the 8B steps but for leaderboard-turns and the
# first of leaderboard).
# Parts that are compared with each other, as ddp-one-rank and ddp-ctas8 with ddp, come from one host. Minutes between
# two H200s, estimated from committed step times with 12 s to start a command, 1.5 s for a cell, 14 s for a recording:
#
#   part                   minutes  what
#   collectives                0.5  all five, fp32 and bf16
#   ddp                        5.6  2.7b, the 2026 edition's xl: every rung in fp32
#   sharded-optimizer          2.7  2.7b
#   fsdp                       5.2  2.7b: fp32 with 0, 1 and 2 units gathered ahead, bf16-compute
#   traces                     5.8  2.7b: three recorded steps of three rungs, also without communication, and of FSDP
#   ddp-autocast               1.5  both editions' xl: bucketed and torch's
#   ddp-xl                     3.8  the 2025 edition's xl: every rung in fp32
#   ddp-buckets                3.0  its bucket sizes
#   ddp-one-rank               1.9  both on one GPU, what scaling is told by
#   ddp-ctas8                  1.9  both with NCCL on at most eight multiprocessors
#   ddp-host                   3.1  both under autocast, where the host's speed counts: buckets of 25 and 100 MiB
#   sharded-optimizer-xl       2.0
#   fsdp-xl                    2.5
#   fsdp-leaderboard           7.1  the leaderboard's step with fp32 masters, every block computed twice
#   leaderboard                4.0  the same in bf16, what blocks keep and AdamW under backward; by do_bench and recorded
#   leaderboard-turns         11.5  in turns with FSDP2, full checkpointing and keeping attention (150 s for its first row
#                                   from an empty cache); another policy that fits
#   leaderboard-losses         1.1  20 steps of the whole model on a short batch beside fp32
#   leaderboard-masters        1.3  with fp32 master weights
#   leaderboard-fp8            1.2  with products of blocks in fp8, which is outside the rules of the class
#
# Parts ddp-xl, -autocast, -buckets and -one-rank write to FOLDER/ddp, the other -xl likewise, and every other part to a
# folder of its own, pictures of traces to ddp and fsdp; uv run scripts/report.py --adopt FOLDER moves rows and pictures
# to profiles/. RANKS names the worlds (default: 2), TORCHRUN the launcher (default: uv run torchrun).
set -euo pipefail
folder=${1:?usage: scripts/measure_distributed.sh FOLDER PART...}
shift
read -r -a torchrun <<<"${TORCHRUN:-uv run torchrun}"
read -r -a worlds <<<"${RANKS:-2}"
on() { "${torchrun[@]}" --standalone --nproc-per-node "$1" "benchmarks/$2.py" --format csv --out "$out" "${@:3}"; }
ranks() { for n in "${worlds[@]}"; do on "$n" "$@"; done; }
turns() { ranks "$@" --repeat 2; }

for part in "$@"; do
  out="$folder/$part"
  size=2.7b
  case "$part" in
    ddp-xl | sharded-optimizer-xl | fsdp-xl) size=xl out="${out%-xl}" ;;
    ddp-autocast | ddp-buckets | ddp-one-rank) out="$folder/ddp" ;;
  esac
  case "$part" in
    collectives)
      ranks benchmark_collectives --dtype fp32 bf16 ;;
    ddp | ddp-xl)
      turns benchmark_ddp --size "$size" ;;
    ddp-autocast)
      turns benchmark_ddp --size 2.7b xl --dtype autocast-bf16 --ddp bucketed torch ;;
    ddp-buckets)
      turns benchmark_ddp --size xl --ddp bucketed --bucket-size-mb 1 10 100 1000 ;;
    ddp-one-rank)
      on 1 benchmark_ddp --size 2.7b xl --ddp bucketed torch ;;
    ddp-ctas8)
      NCCL_MAX_CTAS=8 ranks benchmark_ddp --size 2.7b xl --ddp overlapped bucketed ;;
    ddp-host)
      turns benchmark_ddp --size 2.7b xl --dtype autocast-bf16 --ddp overlapped bucketed torch \
        --bucket-size-mb 25 100 ;;
    sharded-optimizer | sharded-optimizer-xl)
      turns benchmark_sharded_optimizer --size "$size" ;;
    fsdp)
      turns benchmark_fsdp --size 2.7b --prefetch 0 1 2
      turns benchmark_fsdp --size 2.7b --dtype bf16-compute ;;
    fsdp-xl)
      turns benchmark_fsdp --size xl --dtype fp32 bf16-compute ;;
    traces)
      ranks benchmark_ddp --size 2.7b --ddp naive overlapped bucketed --trace "$folder/ddp"
      ranks benchmark_fsdp --size 2.7b --fsdp ours torch --trace "$folder/fsdp" ;;
    fsdp-leaderboard)
      leaderboard=(--size leaderboard-8b --context-length 32768 --batch-size 1 --dtype bf16-compute --checkpoint full
        --compile --warmup 2 --steps 5)
      turns benchmark_fsdp "${leaderboard[@]}" --fsdp ours torch --attention hopper
      ranks benchmark_fsdp "${leaderboard[@]}" --fsdp torch --attention sdpa-cudnn ;;
    leaderboard | leaderboard-turns | leaderboard-losses | leaderboard-masters | leaderboard-fp8)
      step=(--size leaderboard-8b --context-length 32768 --batch-size 1 --dtype bf16)
      ours=(--fsdp ours --kernels fused --attention hopper --optimizer fused --update under-backward)
      fits=(--memory-budget-gib 134)
      short=(--warmup 2 --steps 5)
      export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True # 6 GiB of the card are left
      case "$part" in
        leaderboard)
          ranks benchmark_fsdp "${step[@]}" "${ours[@]}" "${fits[@]}"
          ranks benchmark_fsdp "${step[@]}" "${ours[@]}" "${fits[@]}" --do-bench on --trace "$folder/leaderboard" "${short[@]}" ;;
        leaderboard-turns)
          turns benchmark_fsdp "${step[@]}" "${ours[@]}" "${fits[@]}" --peer-checkpoint full keep-attention
          ranks benchmark_fsdp "${step[@]}" --fsdp torch --compile --attention sdpa-cudnn --checkpoint first-16 "${short[@]}" ;;
        leaderboard-losses)
          ranks benchmark_fsdp "${step[@]}" "${ours[@]}" --keep products --context-length 1024 --losses 20 "${short[@]}" ;;
        leaderboard-masters)
          ranks benchmark_fsdp "${step[@]}" "${ours[@]}" --master fp32 --memory-budget-gib 133 "${short[@]}" ;;
        leaderboard-fp8)
          ranks benchmark_fsdp "${step[@]}" "${ours[@]}" --keep products --matmul-dtype e4m3 "${short[@]}" ;;
      esac
      unset PYTORCH_CUDA_ALLOC_CONF ;;
    *)
      echo "unknown part '$part': see the head of scripts/measure_distributed.sh" >&2
      exit 2 ;;
  esac
done
