#!/usr/bin/env bash
# Measure what profiles/results/<gpu>/ and profiles/digests/<gpu>/ hold for several GPUs of one host.
#
#   scripts/measure_distributed.sh FOLDER PART...
#
# Nothing else may run on the host. Parts named together share a launch and what it loads, where that does them no harm;
# every cell has its own model.
# What is compared is measured by one command in two rounds, the second one backwards: five steps of warm-up and five
# timed ones, then two of warm-up, as the ranks are warm, and five more. Steps without communication, recordings, memory
# and what is sent are taken in the first round. Ten are timed in each round where they scatter or still get faster
# (ddp-autocast, ddp-host), and where there is one; five after two where they take five seconds and what is compared with
# them has a command of its own (fsdp-leaderboard, and the 8B steps but for those beside FSDP2, -attempts and -policy).
# Ours and FSDP2's 8B steps are measured one after the other, ten after five, in one command and one round.
# Parts that are compared with each other, as ddp-one-rank with ddp, come from one host. Seconds between
# two H200s by arithmetic, from committed step times with 1 s for a cell and 3 s for a recording; a launch takes 15
# more:
#
#   part                   seconds  what
#   collectives                 20  all five, fp32 and bf16; in each world of RANKS
#   ddp                        155  2.7b, the 2026 edition's xl: every rung in fp32; two of them recorded
#   sharded-optimizer           75  2.7b
#   fsdp                        55  2.7b in fp32: ours and FSDP2, both recorded
#   fsdp-more                   90  2.7b: beside data parallelism, with 0 and 2 units gathered ahead, bf16-compute
#   traces                      45  2.7b: bucketed and torch's, recorded; few of their steps are timed
#   ddp-autocast                60  both editions' xl: bucketed and torch's
#   ddp-xl                      90  the 2025 edition's xl: every rung in fp32
#   ddp-buckets                 75  its bucket sizes
#   ddp-one-rank                75  both on one GPU, what scaling is told by
#   ddp-ctas8                  200  2.7b with gradients sent by at most eight thread blocks of NCCL, and by as many as
#                                   it chooses
#   ddp-host                   110  both under autocast, where the host's speed counts: buckets of 25 and 100 MiB
#   sharded-optimizer-xl        55
#   fsdp-xl                     65
#   fsdp-gathers                80  2.7b in fp32: ours in collectives and by copies, and FSDP2
#   fsdp-leaderboard           425  the leaderboard's step with fp32 masters, every block computed twice
#   leaderboard                465  the same in bf16, products kept, AdamW under backward: recorded, then beside FSDP2
#                                   with full checkpointing and with attention kept, compiled from scratch
#   leaderboard-attempts       130  with more kept, as the memory planner chooses, on a host of its own
#   leaderboard-policy         380  ours, and FSDP2 with matmuls of its last blocks kept, too: POLICIES (default:
#                                   keep-matmuls-20 keep-matmuls-16; as measured, 110 s for ours and 130 for each)
#   leaderboard-losses          65  20 steps of the whole model on a short batch beside fp32
#   leaderboard-masters         80  with fp32 master weights
#   leaderboard-gathers        190  gathers in collectives, and by copies
#   leaderboard-fp8             70  with products of blocks in fp8, which is outside the rules of the class
#   ddp-four                   475  both editions' xl on four: every rung in fp32; bucketed and torch's on two and on one
#   ddp-four-ctas              300  bucketed with at most 4 to 16 thread blocks of NCCL beside as many as it chooses; on one
#   fsdp-four                  440  both in fp32 and bf16-compute on four, two and one: ours and FSDP2; DDP on one
#   leaderboard-four           350  the leaderboard's step on four, one sequence each: beside FSDP2 with attention kept;
#                                   with more kept, as the memory planner chooses, beside products alone
#
# Parts ddp-xl, -autocast and -one-rank write to FOLDER/ddp, fsdp-more to FOLDER/fsdp, the other -xl likewise, and
# every other part to a folder of its own, pictures of traces to ddp and fsdp; uv run scripts/report.py --adopt
# FOLDER moves rows and pictures to profiles/. RANKS names the worlds (default: 2) of parts that do not name their own,
# as the last four do; TORCHRUN the launcher (default: uv run torchrun).
set -euo pipefail
folder=${1:?usage: scripts/measure_distributed.sh FOLDER PART...}
shift
read -r -a torchrun <<<"${TORCHRUN:-uv run torchrun}"
read -r -a worlds <<<"${RANKS:-2}"
waiting=() # commands of the next launch, each with a plus before it
ranks() { waiting+=(+ "$1" --format csv --out "$out" "${@:2}"); }
turns() { ranks "$@" --repeat 2 --steps 5 --later-warmup 2; }
long_turns() { ranks "$@" --repeat 2; }
launch() { # on so many ranks
  if [ ${#waiting[@]} -gt 0 ]; then
    for n in "$@"; do
      "${torchrun[@]}" --standalone --nproc-per-node "$n" scripts/run_benchmarks.py "${waiting[@]:1}"
    done
  fi
  waiting=()
}

for part in "$@"; do
  out="$folder/$part"
  size=2.7b
  case "$part" in
    ddp-xl | sharded-optimizer-xl | fsdp-xl) size=xl out="${out%-xl}" ;;
    ddp-autocast | ddp-one-rank) out="$folder/ddp" ;;
    fsdp-more) out="$folder/fsdp" ;;
  esac
  # These differ in their launch, need memory that an earlier benchmark may not have given back, or wait for the host,
  # which launches kernels more slowly once a process has recorded some.
  case "$part" in
    ddp-one-rank | *leaderboard* | collectives | *-four | ddp-four-ctas | ddp-autocast | ddp-host | fsdp-more | fsdp-gathers | fsdp-xl)
      launch "${worlds[@]}" ;;
  esac
  case "$part" in
    collectives)
      ranks benchmark_collectives --dtype fp32 bf16 ;;
    ddp-four)
      turns benchmark_ddp --size 2.7b xl
      launch 4
      for n in 2 1; do
        ranks benchmark_ddp --size 2.7b xl --ddp bucketed torch
        launch "$n"
      done ;;
    ddp-four-ctas)
      turns benchmark_ddp --size 2.7b xl --ddp bucketed --max-ctas 0 4 8 12 16
      launch 4
      ranks benchmark_ddp --size 2.7b xl --ddp bucketed
      launch 1 ;;
    fsdp-four)
      for size in 2.7b xl; do
        turns benchmark_fsdp --size "$size" --dtype fp32 bf16-compute --fsdp ours torch
        launch 4
        ranks benchmark_fsdp --size "$size" --dtype fp32 bf16-compute --fsdp ours torch
        launch 2
        ranks benchmark_fsdp --size "$size" --dtype fp32 bf16-compute --fsdp ours torch ddp # alone, DDP shares nothing
        launch 1
      done ;;
    ddp)
      turns benchmark_ddp --size 2.7b --trace "$folder/ddp" --recorded naive overlapped ;;
    traces)
      ranks benchmark_ddp --size 2.7b --ddp bucketed torch --warmup 2 --steps 2 --trace "$folder/ddp" ;;
    ddp-xl)
      turns benchmark_ddp --size xl ;;
    ddp-autocast)
      long_turns benchmark_ddp --size 2.7b xl --dtype autocast-bf16 --ddp bucketed torch ;;
    ddp-buckets)
      turns benchmark_ddp --size xl --ddp bucketed --bucket-size-mb 1 10 100 1000 ;;
    ddp-one-rank)
      ranks benchmark_ddp --size 2.7b xl --ddp bucketed torch
      launch 1 ;;
    ddp-ctas8)
      ranks benchmark_ddp --size 2.7b --ddp overlapped bucketed torch --max-ctas 0 8 ;;
    ddp-host)
      long_turns benchmark_ddp --size 2.7b xl --dtype autocast-bf16 --ddp overlapped bucketed torch \
        --bucket-size-mb 25 100 ;;
    sharded-optimizer | sharded-optimizer-xl)
      # two steps more, in which memory is read
      ranks benchmark_sharded_optimizer --size "$size" --repeat 2 --steps 5 --warmup 3 --later-warmup 0 ;;
    fsdp)
      turns benchmark_fsdp --size 2.7b --fsdp ours torch --trace "$folder/fsdp" ;;
    fsdp-more)
      turns benchmark_fsdp --size 2.7b --dtype bf16-compute
      turns benchmark_fsdp --size 2.7b --fsdp ddp
      turns benchmark_fsdp --size 2.7b --fsdp ours --prefetch 0 2 ;;
    fsdp-gathers)
      turns benchmark_fsdp --size 2.7b --fsdp ours torch --gather-by collectives copies ;;
    fsdp-xl)
      turns benchmark_fsdp --size xl --dtype fp32 bf16-compute ;;
    fsdp-leaderboard)
      leaderboard=(--size leaderboard-8b --context-length 32768 --batch-size 1 --dtype bf16-compute --checkpoint full
        --compile --warmup 2 --steps 5)
      long_turns benchmark_fsdp "${leaderboard[@]}" --fsdp ours torch --attention hopper
      launch "${worlds[@]}"
      ranks benchmark_fsdp "${leaderboard[@]}" --fsdp torch --attention sdpa-cudnn
      launch "${worlds[@]}" ;;
    leaderboard | leaderboard-four | leaderboard-attempts | leaderboard-policy | leaderboard-losses | leaderboard-masters | leaderboard-gathers | leaderboard-fp8)
      step=(--size leaderboard-8b --context-length 32768 --batch-size 1 --dtype bf16)
      ours=(--fsdp ours --kernels fused --attention hopper --optimizer fused --update under-backward)
      best=("${ours[@]}" --keep products)
      short=(--warmup 2 --steps 5)
      export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True # 6 GiB of the card are left
      case "$part" in
        leaderboard)
          ranks benchmark_fsdp "${step[@]}" "${best[@]}" "${short[@]}" --trace "$folder/leaderboard"
          launch "${worlds[@]}"
          out="$folder/leaderboard-turns"
          ranks benchmark_fsdp "${step[@]}" "${best[@]}" --peer-checkpoint full keep-attention ;;
        leaderboard-four)
          ranks benchmark_fsdp "${step[@]}" "${best[@]}" --peer-checkpoint keep-attention
          launch 4
          ranks benchmark_fsdp "${step[@]}" "${ours[@]}" --keep 1xall+all-swiglu "${short[@]}"
          ranks benchmark_fsdp "${step[@]}" "${best[@]}" "${short[@]}"
          launch 4 ;;
        leaderboard-attempts)
          ranks benchmark_fsdp "${step[@]}" "${ours[@]}" --keep 18xall-swiglu+products ;;
        leaderboard-policy)
          read -r -a policies <<<"${POLICIES:-keep-matmuls-20 keep-matmuls-16}" # keep-matmuls-23 took 133 GiB
          ranks benchmark_fsdp "${step[@]}" "${best[@]}" --peer-checkpoint "${policies[@]}" ;;
        leaderboard-losses)
          ranks benchmark_fsdp "${step[@]}" "${best[@]}" --context-length 1024 --losses 20 "${short[@]}" ;;
        leaderboard-masters)
          ranks benchmark_fsdp "${step[@]}" "${ours[@]}" --master-weights fp32 --keep 10xproducts+products-residual "${short[@]}" ;;
        leaderboard-gathers)
          ranks benchmark_fsdp "${step[@]}" "${best[@]}" --gather-by collectives copies ;;
        leaderboard-fp8)
          ranks benchmark_fsdp "${step[@]}" "${best[@]}" --matmul-dtype e4m3 "${short[@]}" ;;
      esac
      launch "${worlds[@]}"
      unset PYTORCH_CUDA_ALLOC_CONF ;;
    *)
      echo "unknown part '$part': see the head of scripts/measure_distributed.sh" >&2
      exit 2 ;;
  esac
done
launch "${worlds[@]}"
