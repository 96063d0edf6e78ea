#!/usr/bin/env bash
# Measure what profiles/results/<gpu>/ holds for attention, on one GPU.
#
#   scripts/measure_attention.sh FOLDER PART...   # parts: training pytorch variants flash-bf16 flash-fp32 tiles model
#
# The flash parts take about five minutes each on an H200, training three, the others one or two. The tiled
# implementation launches a dozen small operations for each of its tiles, so its part of the flash grid ends at length
# 4096. PYTHON picks the interpreter (default: uv run). Each part appends to its own folder below FOLDER;
# uv run scripts/report.py --adopt FOLDER moves the rows to profiles/results/<gpu>/.
set -euo pipefail
folder=${1:?usage: scripts/measure_attention.sh FOLDER PART...}
shift
read -r -a python <<<"${PYTHON:-uv run}"
attention() { "${python[@]}" benchmarks/benchmark_attention.py --format csv --out "$out" "$@"; }
fast=(reference reference-compiled flash hopper sdpa-flash sdpa-cudnn sdpa-efficient flex)

for part in "$@"; do
  out="$folder/attention-$part"
  case "$part" in
    training)
      attention --grid training --impl flash hopper sdpa-flash sdpa-cudnn flex --repeat 3 ;;
    pytorch)
      attention --grid pytorch ;;
    variants)
      attention --grid variants ;;
    flash-bf16|flash-fp32)
      attention --grid flash --dtype "${part#flash-}" --impl "${fast[@]}"
      attention --grid flash --dtype "${part#flash-}" --impl tiled --length 128 256 512 1024 2048 4096 ;;
    tiles)
      attention --grid training --impl flash --length 2048 16384 --autotune ;;
    model)
      "${python[@]}" benchmarks/benchmark_model.py --format csv --out "$out" --size small xl --context-length 2048 \
        --dtype bf16 --mode step --attention reference reference-compiled flash hopper sdpa-flash sdpa-cudnn sdpa-efficient flex ;;
    *)
      echo "unknown part '$part': parts are training, pytorch, variants, flash-bf16, flash-fp32, tiles and model" >&2
      exit 2 ;;
  esac
done
