#!/usr/bin/env bash
# Measure what profiles/results/<gpu>/ holds for benchmark_model.py and benchmark_harness.py, on one GPU.
#
#   scripts/measure_models.sh FOLDER PART...      # parts: grid context-512 compiled optimizers warmup harness attention
#
# On an H200 the grid takes about seven minutes, the other parts together about twelve. PYTHON picks the interpreter
# (default: uv run). Each part appends to its own folder below FOLDER.
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
    compiled)
      model --size "${sizes[@]}" --dtype fp32 --mode step --compile off on --out "$out"
      model --size "${sizes[@]}" --dtype autocast-bf16 --mode step --compile off on --repeat 3 --out "$out" ;;
    optimizers)
      model --size small xl 2.7b --optimizer reference torch-fused --mode step --out "$out" ;;
    attention)
      "${python[@]}" benchmarks/benchmark_attention.py --format csv --grid training \
        --impl flash sdpa-flash sdpa-cudnn flex --out "$out" ;;
    warmup)
      model --size small xl --warmup 0 1 2 5 --mode step --out "$out" ;;
    harness)
      "${python[@]}" benchmarks/benchmark_harness.py --format csv --out "$out" ;;
    *)
      echo "unknown part '$part': parts are grid, context-512, compiled, optimizers, warmup, harness and attention" >&2
      exit 2 ;;
  esac
done
