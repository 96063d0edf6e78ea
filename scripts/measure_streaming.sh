#!/usr/bin/env bash
# Measure what profiles/results/<gpu>/streaming holds: training steps under caps on device and host memory, on one GPU and
# in a ring of several; and simulate what profiles/results/cpu/streaming-simulated holds, on any machine.
#
#   scripts/measure_streaming.sh FOLDER PART...
#
# Parts, with minutes on one H200 and the GiB of host memory that they take:
#
#   1b         1   24  Llama 3 1B at 8,192 tokens within 12 and 24 GiB
#   8k         5  115  Llama 3 8B at 8,192: 24 and 75 GiB with its timeline, without caps beside the compiled model, 24 and 115
#   32k        5  120  at 32,768: 24 and 80 GiB, 24 and 120
#   128k       2  115  at 131,072: 78 and 115 GiB
#   512k       9  120  at 524,288: 130 and 120 GiB, one step (streaming-long)
#   32b        5  240  Qwen2.5-32B's shape at 8,192: 80 and 240 GiB, on a host with 256
#   offload    5  100  8B at 8,192 without caps: ours, and FSDP2 with state and optimizer on the host, both with one, two and four
#                      sequences at a time (streaming-chunks)
#   fp8        6   75  8B at 8,192 within 24 and 75 GiB, and 78 and 75: in bf16 and e4m3 (streaming-fp8)
#   14b        5  110  Qwen2.5-14B at 1,024 within 78 and 110: in bf16 and e4m3 (streaming-fp8)
#   ring       3  160  8B at 8,192 within 24 and 75 GiB on one GPU, and the same on each of two
#   ring-four  3  300  the same with four, on a host of four GPUs
#   grid       8  115  at 8,192: three capacities of each in steps of 131,072 tokens
#   simulated  -    1  both models at 1,024, 8,192, 32,768 and 131,072, 8B at 524,288: 40 minutes of one core
#
# A recorded step begins after each of its kernels has run once, and mostly lasts a minute. Rows are appended to
# streaming, streaming-long, streaming-chunks, streaming-fp8, streaming-ring and streaming-simulated in FOLDER; uv run
# scripts/report.py --adopt FOLDER moves them to profiles/results/<gpu>/; with --machine cpu, from a folder of its own,
# the simulated. PYTHON picks the interpreter (default: uv run). Run nothing else on the host.
set -euo pipefail
folder=${1:?usage: scripts/measure_streaming.sh FOLDER PART...}
shift
read -r -a python <<<"${PYTHON:-uv run}"
into() { "${python[@]}" benchmarks/benchmark_streaming.py --format csv --out "$folder/$1" --warmup 0 "${@:2}"; }
streaming() { into streaming "$@"; }
simulated() {
  "${python[@]}" benchmarks/benchmark_streaming.py --format csv --out "$folder/streaming-simulated" --device cpu --gpu h200 \
    "$@"
}

for part in "$@"; do
  case "$part" in
    1b)
      streaming --size llama3-1b --device-gib 12 --host-gib 24 ;;
    8k)
      streaming --device-gib 24 --host-gib 75 --steps 1 --timeline
      streaming --device-gib 132 --host-gib 16 --peers compiled
      streaming --device-gib 24 --host-gib 115 --steps 1 ;;
    32k)
      streaming --context-length 32768 --device-gib 24 --host-gib 80 120 --steps 1 ;;
    128k)
      streaming --context-length 131072 --device-gib 78 --host-gib 115 --tokens-per-step 131072 --steps 1 ;;
    512k)
      into streaming-long --context-length 524288 --device-gib 130 --host-gib 120 --tokens-per-step 524288 --steps 1 \
        --timeout 1800 ;;
    32b)
      streaming --size qwen2.5-32b --device-gib 80 --host-gib 240 --tokens-per-step 393216 --steps 1 ;;
    offload)
      for chunk in 8192 16384 32768; do
        into streaming-chunks --device-gib 132 --host-gib 16 --chunk "$chunk" --peers fsdp2-offload \
          --tokens-per-step 65536 --steps 1
      done ;;
    fp8)
      into streaming-fp8 --device-gib 24 78 --host-gib 75 --recipe stored e4m3 --tokens-per-step 262144 --steps 1 ;;
    14b)
      into streaming-fp8 --size qwen2.5-14b --context-length 1024 --device-gib 78 --host-gib 110 --recipe stored e4m3 \
        --tokens-per-step 524288 --steps 1 ;;
    ring | ring-four)
      worlds=(1 2)
      [ "$part" = ring ] || worlds+=(4)
      into streaming-ring --device-gib 24 --host-gib 75 --world-size "${worlds[@]}" --tokens-per-step 262144 --steps 1 ;;
    grid)
      streaming --device-gib 16 24 40 --host-gib 60 75 115 --tokens-per-step 131072 --steps 1 ;;
    simulated)
      simulated --size llama3-8b --context-length 1024 8192 --device-gib 16 24 40 --host-gib 60 75 115
      simulated --size llama3-8b --context-length 32768 --device-gib 16 24 40 --host-gib 60 80 115
      simulated --size llama3-8b --context-length 131072 --device-gib 24 40 78 --host-gib 80 115 230
      simulated --size llama3-8b --context-length 524288 --device-gib 78 130 --host-gib 120 230
      simulated --size llama3-1b --context-length 1024 8192 32768 131072 --device-gib 6 8 12 --host-gib 12 16 24 ;;
    *)
      echo "unknown part '$part': parts are 1b, 8k, 32k, 128k, 512k, 32b, offload, fp8, 14b, ring, ring-four, grid, simulated" >&2
      exit 2 ;;
  esac
done
