#!/usr/bin/env bash
# Measure what profiles/fp8.md tells: products and blocks in fp8 beside bf16 and torchao's, and what runs learn, on one GPU.
#
#   scripts/measure_fp8.sh FOLDER PART...
#
# Parts, with minutes on one H200:
#
#   fp8        6  products and a block of Llama-3-8B at 16,384 tokens, all recipes, beside compiled bf16 and torchao's
#   learning   3  Qwen's shape at 100M on the standard library's source: five recipes, three seeds
#
# Learning's data are data/stdlib-bpe4096, made here if they are not there. torchao comes with uv sync; without it its rows
# say so. Rows are appended to FOLDER/PART; uv run scripts/report.py --adopt FOLDER moves them to profiles/results/<gpu>/.
# PYTHON picks the interpreter (default: uv run). Run nothing else on the host.
set -euo pipefail
folder=${1:?usage: scripts/measure_fp8.sh FOLDER PART...}
shift
read -r -a python <<<"${PYTHON:-uv run}"

for part in "$@"; do
  case "$part" in
    fp8)
      "${python[@]}" benchmarks/benchmark_fp8.py --format csv --out "$folder/fp8" ;;
    learning)
      [ -e data/stdlib-bpe4096 ] || "${python[@]}" scripts/tokenize_data.py --out data/stdlib-bpe4096 >&2
      "${python[@]}" benchmarks/benchmark_learning.py --format csv --out "$folder/learning" ;;
    *)
      echo "unknown part '$part': parts are fp8, learning" >&2
      exit 2 ;;
  esac
done
