#!/usr/bin/env bash
# Measure what profiles/results/<gpu>/ holds for benchmark_model.py and benchmark_harness.py, on one GPU.
#
#   scripts/measure_models.sh FOLDER PART...
#
# Parts: grid context-512 memory-256 compiled optimizers warmup harness checkpointing leaderboard-one-gpu. On an H200 the grid and compiled
# take about seven minutes each, checkpointing about eight, the leaderboard's step on one GPU (inputs of blocks in host memory) about two, the others
# together about five. Compiling whole models is not
# in these seven: it takes the longer the more blocks a model has, perhaps ten minutes more in all. Checkpointing compares
# what the host adds to a step: run it alone on its host. PYTHON picks the interpreter (default: uv run).
# Each part appends to its own folder below FOLDER; uv run scripts/report.py --adopt FOLDER moves the rows to
# profiles/results/<gpu>/.
set -euo pipefail
folder=${1:?usage: scripts/measure_models.sh FOLDER PART...}
shift
read -r -a python <<<"${PYTHON:-uv run}"
model() { "${python[@]}" benchmarks/benchmark_model.py --format csv "$@"; }
sizes=(small medium large xl 2.7b 10b)

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
      model --size "${sizes[@]}" --dtype fp32 --mode step --compile off on whole-model --out "$out"
      model --size "${sizes[@]}" --dtype autocast-bf16 --mode step --compile off on whole-model --repeat 3 --out "$out" ;;
    optimizers)
      model --size small xl 2.7b --optimizer reference torch-fused --mode step --out "$out" ;;
    checkpointing)
      model --size 2.7b --context-length 2048 --dtype autocast-bf16 --mode step --warmup 2 --out "$out" \
        --checkpoint none full every-2 every-4 every-8 first-16 first-24 keep-matmuls keep-attention recursive
      model --size 2.7b --context-length 1024 --dtype autocast-bf16 --mode step --warmup 2 --out "$out" \
        --checkpoint none full keep-matmuls
      model --size 2.7b --context-length 2048 --dtype fp32 --mode step --warmup 2 --out "$out" \
        --checkpoint none full every-2 every-4 every-8 ;;
    warmup)
      model --size small xl --warmup 0 1 2 5 --mode step --out "$out" ;;
    leaderboard-one-gpu)
      PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True model --size leaderboard-8b --context-length 32768 --batch-size 1 \
        --dtype bf16 --kernels fused --attention hopper --optimizer fused --keep products-residual --offload residual \
        --mode step --out "$out" ;;
    harness)
      "${python[@]}" benchmarks/benchmark_harness.py --format csv --out "$out" ;;
    *)
      echo "unknown part '$part': parts are grid, context-512, memory-256, compiled, optimizers, warmup," \
        "harness, checkpointing, leaderboard-one-gpu; attention has measure_attention.sh" >&2
      exit 2 ;;
  esac
done
