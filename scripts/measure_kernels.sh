#!/usr/bin/env bash
# Measure what profiles/results/<gpu>/kernels and fused hold for benchmark_kernels.py and benchmark_blocks.py: one GPU.
#
#   scripts/measure_kernels.sh FOLDER PART...
#
# Parts, with minutes on one H200 by arithmetic (most are torch.compile's):
#
#   norms            5  RMSNorm, with and without the residual add, 4k to 64k tokens, widths of six models
#   elementwise      6  SwiGLU and RoPE at the same
#   optimizer        3  AdamW, gradient norm
#   quantize         5  quantization to fp8 and the largest magnitudes that it asks for
#   head             4  loss of a head: 32,768 x 4096 x 151,936
#   head-widths      6  the same at 16,384 tokens, widths of six models
#   leaderboard      5  a block of leaderboard-8b at 1 x 32,768, at each level and compiled, also with cuDNN's attention
#   llama            4  the same of llama3-8b at 2 x 8,192
#   qwen             6  blocks of Qwen2.5 at sequences of 1,024
#   stacks           6  six blocks of leaderboard-8b and llama3-8b: their peak
#
# Peers need liger-kernel and cut-cross-entropy (uv sync, or pip install); without them their rows say so. The first six
# append to FOLDER/kernels, the others to FOLDER/fused; uv run scripts/report.py --adopt FOLDER moves the rows to
# profiles/results/<gpu>/. PYTHON picks the interpreter (default: uv run). Ways that are compared follow each other in
# one process; blocks take turns, since a long one runs at the power cap. Run nothing else on the host.
set -euo pipefail
folder=${1:?usage: scripts/measure_kernels.sh FOLDER PART...}
shift
read -r -a python <<<"${PYTHON:-uv run}"
kernels() { "${python[@]}" benchmarks/benchmark_kernels.py --format csv --out "$folder/kernels" "$@"; }
blocks() { "${python[@]}" benchmarks/benchmark_blocks.py --format csv --out "$folder/fused" "$@"; }
tokens=(4096 16384 65536)
levels=(input attention products all)

for part in "$@"; do
  case "$part" in
    norms)
      kernels --kernel rms_norm add_rms_norm --rows "${tokens[@]}" ;;
    elementwise)
      kernels --kernel swiglu rotary --rows "${tokens[@]}" ;;
    optimizer)
      kernels --kernel adamw grad_norm --rows 4096 16384 ;;
    quantize)
      kernels --kernel absmax rms_norm.absmax swiglu.absmax adamw.absmax quantize quantize.transposed quantize_blocks ;;
    head)
      kernels --kernel linear_cross_entropy --rows 32768 --size llama3-8b --samples 30 ;;
    head-widths)
      kernels --kernel linear_cross_entropy --rows 16384 --samples 30 ;;
    leaderboard)
      blocks --size leaderboard-8b --context-length 32768 --how compiled "${levels[@]}" products-residual
      blocks --size leaderboard-8b --context-length 32768 --attention sdpa-cudnn --how compiled ;;
    llama)
      blocks --size llama3-8b --context-length 8192 --batch-size 2 --how compiled "${levels[@]}"
      blocks --size llama3-8b --context-length 8192 --batch-size 2 --attention sdpa-cudnn --how compiled ;;
    qwen)
      blocks --size qwen2.5-0.5b --context-length 1024 --batch-size 32 --how compiled "${levels[@]}"
      blocks --size qwen2.5-1.5b --context-length 1024 --batch-size 16 --how compiled "${levels[@]}"
      blocks --size qwen2.5-3b --context-length 1024 --batch-size 8 --how compiled "${levels[@]}"
      blocks --size qwen2.5-7b --context-length 1024 --batch-size 4 --how compiled "${levels[@]}" ;;
    stacks)
      blocks --size leaderboard-8b --context-length 32768 --layers 6 --how compiled products all --repeat 2
      blocks --size llama3-8b --context-length 8192 --batch-size 2 --layers 6 --how compiled products all --repeat 2 ;;
    *)
      echo "unknown part '$part': parts are norms, elementwise, optimizer, quantize, head, head-widths, leaderboard," \
        "llama, qwen, stacks" >&2
      exit 2 ;;
  esac
done
