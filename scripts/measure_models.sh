#!/usr/bin/env bash
# Measure what profiles/results/<gpu>/ holds for benchmark_model.py and benchmark_harness.py, on one GPU.
#
#   scripts/measure_models.sh FOLDER PART...
#
# Seconds on an H200, from committed rows; medium's share of whole-model by guess:
#
#   grid                 420  every size and length
#   context-512          200  every dtype
#   memory-256            30
#   compiled             420  eager and with compiled blocks, under autocast three times
#   whole-model          230  both, and the model as one graph, twice, of small and medium: compiling takes 3 s for a block,
#                             so the graphs are made before, all at once; SIZES names others
#   optimizers            50
#   warmup                60
#   harness               30
#   checkpointing        180  2.7b under autocast at 2,048: every policy, those that sentences name first
#   checkpointing-fp32   155  the same in fp32, segments of k blocks: five steps after one, as they take 5.6 s
#   checkpointing-1024    45  at 1,024
#   leaderboard-one-gpu  120  the leaderboard's step on one GPU, inputs of blocks in host memory
#
# Checkpointing compares what the host adds to a step: run it alone on its host. PYTHON picks the interpreter (default:
# uv run). Each part appends to its own folder below FOLDER, checkpointing's to one; uv run scripts/report.py
# --adopt FOLDER moves the rows to profiles/results/<gpu>/.
set -euo pipefail
folder=${1:?usage: scripts/measure_models.sh FOLDER PART...}
shift
read -r -a python <<<"${PYTHON:-uv run}"
model() { "${python[@]}" benchmarks/benchmark_model.py --format csv "$@"; }
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-${TMPDIR:-/tmp}/torchinductor_$(id -un)}
sizes=(small medium large xl 2.7b 10b)
read -r -a whole <<<"${SIZES:-small medium}"

for part in "$@"; do
  out="$folder/$part"
  case "$part" in
    grid)
      model --size "${sizes[@]}" --context-length 128 256 512 1024 2048 --dtype fp32 autocast-bf16 --mode step --out "$out" ;;
    context-512)
      model --size "${sizes[@]}" --dtype fp32 autocast-bf16 tf32 bf16 --mode forward step --out "$out" ;;
    memory-256)
      model --size 2.7b --context-length 256 --dtype fp32 autocast-bf16 --mode forward --out "$out" ;;
    compiled)
      model --size "${sizes[@]}" --dtype fp32 --mode step --compile off on --out "$out"
      model --size "${sizes[@]}" --dtype autocast-bf16 --mode step --compile off on --repeat 3 --out "$out" ;;
    whole-model)
      mkdir -p "$TORCHINDUCTOR_CACHE_DIR"
      for size in "${whole[@]}"; do
        for dtype in fp32 autocast-bf16; do
          model --size "$size" --dtype "$dtype" --mode step --compile whole-model --warmup 1 --steps 1 >&2 &
        done
      done
      wait
      # Where torch.compile chose between kernels by their times, those were not alone: it chooses again.
      find "$TORCHINDUCTOR_CACHE_DIR" -name '*.best_config' -delete
      model --size "${whole[@]}" --dtype fp32 autocast-bf16 --mode step --compile off on whole-model --repeat 2 \
        --out "$out" ;;
    optimizers)
      model --size small xl 2.7b --optimizer reference torch-fused --mode step --out "$out" ;;
    checkpointing)
      model --size 2.7b --context-length 2048 --dtype autocast-bf16 --mode step --warmup 2 --out "$out" \
        --checkpoint full first-16 keep-matmuls every-2 every-4 keep-attention first-24 every-8 recursive none ;;
    checkpointing-fp32)
      model --size 2.7b --context-length 2048 --dtype fp32 --mode step --warmup 1 --steps 5 \
        --out "$folder/checkpointing" --checkpoint full every-2 every-4 every-8 none ;;
    checkpointing-1024)
      model --size 2.7b --context-length 1024 --dtype autocast-bf16 --mode step --warmup 2 \
        --out "$folder/checkpointing" --checkpoint none full keep-matmuls ;;
    warmup)
      model --size small xl --warmup 0 1 2 5 --mode step --out "$out" ;;
    leaderboard-one-gpu)
      PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True model --size leaderboard-8b --context-length 32768 --batch-size 1 \
        --dtype bf16 --kernels fused --attention hopper --optimizer fused --keep products-residual --offload residual \
        --mode step --out "$out" ;;
    harness)
      "${python[@]}" benchmarks/benchmark_harness.py --format csv --out "$out" ;;
    *)
      echo "unknown part '$part': see the head of scripts/measure_models.sh; attention has measure_attention.sh" >&2
      exit 2 ;;
  esac
done
