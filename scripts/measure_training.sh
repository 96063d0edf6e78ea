#!/usr/bin/env bash
# Measure what profiles/results/<gpu>/training holds: steady tokens per second of whole runs, on one GPU.
#
#   scripts/measure_training.sh FOLDER PART...
#
# Parts, with minutes on one H200 by arithmetic, at sequences of 1,024 and 524,288 tokens a step:
#
#   0.5b             8  Qwen2.5-0.5B at 32 sequences: ours with fused kernels and our own products, transformers compiled, and with Liger
#   1.5b             9  Qwen2.5-1.5B at 16
#   3b              10  Qwen2.5-3B at 16
#   7b              15  Qwen2.5-7B at 8, keeping products: few and long steps
#   keep             3  0.5B keeping products
#   graph            3  0.5B as a CUDA graph
#   fp8             16  each size with products of blocks in fp8, and in bf16 in the same command
#   ranks            8  0.5B and 1.5B at ZeRO-1 and 2 on two GPUs, and on one of them (FOLDER/training-2)
#
# Data are random tokens of the model's vocabulary, which the rows say. The peer needs liger-kernel and transformers (uv
# sync); without them its row says so. Rows are appended to FOLDER/training; uv run scripts/report.py --adopt FOLDER moves
# them to profiles/results/<gpu>/. PYTHON picks the interpreter (default: uv run). Run nothing else on the host.
set -euo pipefail
folder=${1:?usage: scripts/measure_training.sh FOLDER PART...}
shift
read -r -a python <<<"${PYTHON:-uv run}"
into() { "${python[@]}" benchmarks/benchmark_training.py --format csv --out "$folder/$1" "${@:2}"; }
ours=(--keep all --cuda-graph off --warmup 2)
training() { into training "${ours[@]}" --kernels fused "$@"; }
training-2() { into training-2 "${ours[@]}" --kernels fused "$@"; }

for part in "$@"; do
  case "$part" in
    0.5b)
      training --size qwen2.5-0.5b --batch-size 32 ;;
    1.5b)
      training --size qwen2.5-1.5b --batch-size 16 ;;
    3b)
      training --size qwen2.5-3b --batch-size 16 ;;
    7b)
      training --size qwen2.5-7b --batch-size 8 --keep products ;;
    keep)
      training --size qwen2.5-0.5b --batch-size 32 --how ours --keep products ;;
    graph)
      training --size qwen2.5-0.5b --batch-size 32 --how ours --cuda-graph on --warmup 5 ;;
    fp8)
      for size in "0.5b --batch-size 32 --keep all" "1.5b --batch-size 32 --keep all" "3b --batch-size 16 --keep all" "7b --batch-size 16 --keep products"; do
        into training "${ours[@]}" --size qwen2.5-$size --how ours --kernels fused --recipe stored e4m3
      done ;;
    ranks)
      for size in "qwen2.5-0.5b --batch-size 32" "qwen2.5-1.5b --batch-size 16"; do
        training-2 --size $size --how ours --world-size 1 2 --zero 1
        training-2 --size $size --how ours --world-size 2 --zero 2
      done ;;
    *)
      echo "unknown part '$part': parts are 0.5b, 1.5b, 3b, 7b, keep, graph, fp8, ranks" >&2
      exit 2 ;;
  esac
done
