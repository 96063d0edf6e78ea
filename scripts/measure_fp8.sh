#!/usr/bin/env bash
# Measure what profiles/fp8.md tells: products and blocks in fp8 beside bf16 and torchao's, and what runs learn, on one GPU
# and emulated.
#
#   scripts/measure_fp8.sh FOLDER PART...
#
# Parts, with minutes on one H200:
#
#   fp8        6  products and a block of Llama-3-8B at 16,384 tokens, all recipes, beside compiled bf16 and torchao's
#   learning   3  Qwen's shape at 100M on the standard library's source: five recipes, three seeds
#
# and, on any machine without one:
#
#   learning-emulated  15  two blocks of width 64, five recipes, three seeds: products emulated, so that steps lose what
#                          quantizing loses and nothing else
#
# Learning's data are data/stdlib-bpe4096, made here if they are not there. torchao comes with uv sync; without it its rows
# say so. Rows are appended to FOLDER/PART; uv run scripts/report.py --adopt FOLDER moves them to
# profiles/results/<gpu>/; with --machine cpu, from a folder of its own, the last. PYTHON picks the interpreter (default:
# uv run). Run nothing else on the host.
set -euo pipefail
folder=${1:?usage: scripts/measure_fp8.sh FOLDER PART...}
shift
read -r -a python <<<"${PYTHON:-uv run}"

learning() {
  [ -e data/stdlib-bpe4096 ] || "${python[@]}" scripts/tokenize_data.py --out data/stdlib-bpe4096 >&2
  "${python[@]}" benchmarks/benchmark_learning.py --format csv --out "$folder/$1" "${@:2}"
}

for part in "$@"; do
  case "$part" in
    fp8)
      "${python[@]}" benchmarks/benchmark_fp8.py --format csv --out "$folder/fp8" ;;
    learning)
      learning learning ;;
    learning-emulated)
      OMP_NUM_THREADS=1 learning learning-emulated --device cpu --recipe stored e4m3 e4m3-e5m2 e4m3-row e4m3-block --seeds 3 \
        --batch-size 32 --total-batch-tokens 2048 --steps 120 --warmup 10 ;;
    *)
      echo "unknown part '$part': parts are fp8, learning, learning-emulated" >&2
      exit 2 ;;
  esac
done
