#!/usr/bin/env bash
# Measure what profiles/results/<gpu>/training holds: steady tokens per second of whole runs, on one GPU.
#
#   scripts/measure_training.sh FOLDER PART...
#
# Parts, with minutes on one H200 by arithmetic, at sequences of 1,024 and 524,288 tokens a step:
#
#   0.5b             6  Qwen2.5-0.5B at 32 sequences: ours keeping products and all, transformers compiled, and with Liger
#   1.5b             6  Qwen2.5-1.5B at 16
#   3b               6  Qwen2.5-3B at 16
#   7b              10  Qwen2.5-7B at 8: few and long steps
#   graph            3  0.5B without a CUDA graph
#
# Data are random tokens of the model's vocabulary, which the rows say. The peer needs liger-kernel and transformers (uv
# sync); without them its row says so. Rows are appended to FOLDER/training; uv run scripts/report.py --adopt FOLDER moves
# them to profiles/results/<gpu>/. PYTHON picks the interpreter (default: uv run). Run nothing else on the host.
set -euo pipefail
folder=${1:?usage: scripts/measure_training.sh FOLDER PART...}
shift
read -r -a python <<<"${PYTHON:-uv run}"
training() { "${python[@]}" benchmarks/benchmark_training.py --format csv --out "$folder/training" "$@"; }

for part in "$@"; do
  case "$part" in
    0.5b)
      training --size qwen2.5-0.5b --batch-size 32 --keep products all ;;
    1.5b)
      training --size qwen2.5-1.5b --batch-size 16 --keep products all ;;
    3b)
      training --size qwen2.5-3b --batch-size 16 --keep products all ;;
    7b)
      training --size qwen2.5-7b --batch-size 8 --keep products all --warmup 4 ;;
    graph)
      training --size qwen2.5-0.5b --batch-size 32 --how ours --cuda-graph off ;;
    *)
      echo "unknown part '$part': parts are 0.5b, 1.5b, 3b, 7b, graph" >&2
      exit 2 ;;
  esac
done
