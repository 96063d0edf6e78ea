#!/usr/bin/env bash
# Record the digests that profiles/digests/<gpu>/ holds: where time and memory go, on one GPU.
#
#   scripts/measure_profiles.sh FOLDER PART...    # parts: nsys nsys-autocast quantization quantization-8b memory
#
# On an H200 nsys takes about thirty minutes, nsys-autocast two, quantization two, quantization-8b one, memory three. SIZES
# and LENGTHS name the models and contexts of nsys (default: five of each), so that it can be taken in pieces: LENGTHS=256
# takes about four minutes, 1024 eight, 2048 eight; small at four of them two, large at 256 50 s; a step that does not fit
# is a row that says so. Run nsys alone on its host: launches wait for it.
# PYTHON picks the interpreter (default: uv run). Raw traces and snapshots stay in profiles/raw; every part writes its
# CSVs and pictures to its own folder below FOLDER, from which uv run scripts/report.py --adopt FOLDER moves them
# to profiles/digests/<gpu>/.
set -euo pipefail
folder=${1:?usage: scripts/measure_profiles.sh FOLDER PART...}
shift
read -r -a python <<<"${PYTHON:-uv run}"
read -r -a sizes <<<"${SIZES:-small medium large xl 2.7b}"
read -r -a lengths <<<"${LENGTHS:-128 256 512 1024 2048}"
profile() { "${python[@]}" benchmarks/profile_model.py --format csv --warmup 3 --out "$folder/$part" "$@"; }

for part in "$@"; do
  case "$part" in
    nsys)
      profile --profiler nsys --size "${sizes[@]}" --context-length "${lengths[@]}" ;;
    nsys-autocast)
      profile --profiler nsys --size small large --context-length 512 --dtype autocast-bf16 ;;
    quantization) # a micro-batch of 7B and its optimizer step: what quantization takes of each
      profile --profiler kineto --size qwen2.5-7b --context-length 1024 --batch-size 16 --dtype bf16 \
        --kernels fused --attention hopper --optimizer fused --keep products --matmul-dtype same e4m3 --mode step ;;
    quantization-8b) # two sequences of Llama 3 8B, as measure_training.sh's 8b-e4m3 trains it
      profile --profiler kineto --size llama3-8b --context-length 8192 --batch-size 2 --dtype bf16 \
        --kernels fused --attention hopper --optimizer fused --keep all --matmul-dtype e4m3 --mode step ;;
    memory)
      profile --profiler memory --size 2.7b --context-length 128 2048 --mode forward step --dtype fp32 autocast-bf16 ;;
    *)
      echo "unknown part '$part': parts are nsys, nsys-autocast, quantization, quantization-8b and memory" >&2
      exit 2 ;;
  esac
done
