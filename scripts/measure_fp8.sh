#!/usr/bin/env bash
# Measure what profiles/fp8.md tells of blocks: fp8 beside bf16 and torchao's, on one GPU.
#
#   scripts/measure_fp8.sh FOLDER PART...
#
# Parts, with minutes on one H200:
#
#   fp8        6  a block of Llama-3-8B at 16,384 tokens, all recipes, beside compiled bf16 and torchao's
#
# torchao comes with uv sync; without it its rows say so. Rows are appended to FOLDER/PART; uv run scripts/report.py
# --adopt FOLDER moves them to profiles/results/<gpu>/. PYTHON picks the interpreter (default: uv run). Run nothing else
# on the host. What a recipe costs in loss the trainer tells: profiles/fp8.md has the commands.
set -euo pipefail
folder=${1:?usage: scripts/measure_fp8.sh FOLDER PART...}
shift
read -r -a python <<<"${PYTHON:-uv run}"

for part in "$@"; do
  case "$part" in
    fp8)
      "${python[@]}" benchmarks/benchmark_fp8.py --format csv --out "$folder/fp8" ;;
    *)
      echo "unknown part '$part': the part is fp8" >&2
      exit 2 ;;
  esac
done
