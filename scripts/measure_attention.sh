#!/usr/bin/env bash
# Measure what profiles/results/<gpu>/ holds for attention, on one GPU.
#
#   scripts/measure_attention.sh FOLDER PART...
#
# Nothing else may run on the host. Minutes on an H200, from committed rows; what no row tells is estimated (do_bench: 0.7 s
# for a cell; hopper: as flash; 3 s to compile for a shape, 8 to start):
#
#   part        minutes  what
#   training        4    the shapes of training, in turns, three rounds
#   pytorch         3    the handout's first grid: eager and compiled in turns, two rounds; eager at the two lengths at
#                        which memory ends, at d 64 (a compiled cell takes a minute there, and memory does not scatter)
#   flash           5    of the next two what the documents name, bf16 (2) before fp32: every length and head dimension,
#                        do_bench at d 64, hopper and cuDNN at d 64 and 128 (left out: compiled, tiled, other peers)
#   flash-bf16     10    the handout's second grid with every implementation; do_bench beside the harness for
#                        materialised attention and for our kernels
#   flash-fp32     15    the same in fp32, which hopper and two of the peers refuse
#   variants        2    masks and score modifications
#   model           2    a model's step with every implementation
#   peers           3    flash and hopper beside cuDNN and FlashAttention-4: the shapes of training up to 16,384 tokens,
#                        two rounds, by the harness's clock and without the host's launches (estimated for an H100)
#
# The tiled implementation launches a dozen small operations for each of its tiles, so its part of the flash grid ends
# at length 4096. PYTHON picks the interpreter (default: uv run). Each part appends to its own folder below FOLDER, flash
# to those of flash-bf16 and flash-fp32. FlashAttention-4 needs flash-attn-4 and nvidia-cutlass-dsl[cu13] (pip install);
# without them its rows say so. uv run scripts/report.py --adopt FOLDER moves the rows to profiles/results/<gpu>/.
set -euo pipefail
folder=${1:?usage: scripts/measure_attention.sh FOLDER PART...}
shift
read -r -a python <<<"${PYTHON:-uv run}"
attention() { "${python[@]}" benchmarks/benchmark_attention.py --format csv --out "$out" "$@"; }
both_clocks=(--clock harness do-bench)
peers=(reference-compiled sdpa-flash sdpa-cudnn sdpa-efficient flex)

for part in "$@"; do
  out="$folder/attention-$part"
  case "$part" in
    training)
      attention --grid training --impl flash hopper sdpa-flash sdpa-cudnn flex --repeat 3 ;;
    pytorch)
      attention --grid pytorch --length 256 1024 4096 8192 16384 --repeat 2
      attention --grid pytorch --length 32768 --impl reference
      attention --grid pytorch --length 65536 --d-head 64 --impl reference ;;
    variants)
      attention --grid variants ;;
    flash)
      out="$folder/attention-flash-bf16"
      attention --grid flash --dtype bf16 --impl reference flash hopper sdpa-cudnn --d-head 64 128
      attention --grid flash --dtype bf16 --impl reference flash hopper --d-head 64 --clock do-bench
      attention --grid flash --dtype bf16 --impl reference flash --d-head 16 32
      out="$folder/attention-flash-fp32"
      attention --grid flash --dtype fp32 --impl reference flash --d-head 64 "${both_clocks[@]}"
      attention --grid flash --dtype fp32 --impl reference flash --d-head 16 32 128 ;;
    flash-bf16|flash-fp32)
      attention --grid flash --dtype "${part#flash-}" --impl reference flash hopper "${both_clocks[@]}"
      attention --grid flash --dtype "${part#flash-}" --impl "${peers[@]}"
      attention --grid flash --dtype "${part#flash-}" --impl tiled --length 128 256 512 1024 2048 4096 ;;
    peers)
      attention --grid training --impl flash hopper sdpa-cudnn flash-attn-4 --length 1024 2048 4096 16384 \
        --clock harness device --repeat 2 ;;
    model)
      "${python[@]}" benchmarks/benchmark_model.py --format csv --out "$out" --size small xl --context-length 2048 \
        --dtype bf16 --mode step --attention reference flash hopper "${peers[@]}" ;;
    *)
      echo "unknown part '$part': parts are training, pytorch, flash, flash-bf16, flash-fp32, variants, model, peers" >&2
      exit 2 ;;
  esac
done
