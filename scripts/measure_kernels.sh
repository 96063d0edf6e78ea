#!/usr/bin/env bash
# Measure what profiles/results/<gpu>/kernels, fused, fp8, fused-steps and llama-steps hold, on one GPU.
#
#   scripts/measure_kernels.sh FOLDER PART...
#
# Parts, with seconds on one H200 and 16 cores: compile, widths and head as measured, the others by what a start (10 s),
# a cell, and compiling take there. Nearly all of the time of widths, tokens and head is compiling without
# `compile` before them: torch.compile takes 2 to 9 s for a shape, a Triton kernel 0.5 s, one of attention more.
#
#   compile          75  compiles, on all cores, what widths, tokens and head will run
#   widths          105  RMSNorm, with and without the residual add, SwiGLU, RoPE, AdamW, gradient norm, column sums:
#                        16,384 tokens, widths of six models
#   tokens           50  the first four at 4,096 and 65,536 tokens, widths of llama3-8b
#   head             60  loss of a head beside compiled chunks and Liger's: 32,768 x 4096 x 151,936
#   head-peers       60  the same with all logits at once, and Apple's cut cross entropy
#   head-widths     400  all ways at 16,384 tokens, widths of six models
#   peers            85  on an H100: RMSNorm, with and without the residual add, and AdamW at 16,384 x 4096, and cross
#                        entropy of 8,192 x 131,072, beside quack's, Liger's in Triton and in CuTe DSL, and torch's
#   peers-head       65  the same of the head and loss: 8,192 x 4096 x 131,072
#   quantize        165  quantization to fp8, its transposes, and the largest magnitudes that it asks for
#   leaderboard      80  a block of leaderboard-8b at 1 x 32,768, at each level and compiled
#   llama            65  the same of llama3-8b at 2 x 8,192
#   qwen            240  blocks of Qwen2.5 at sequences of 1,024
#   cudnn            90  both 8B blocks compiled, with cuDNN's attention
#   fp8             360  a block of Llama-3-8B at 16,384 tokens, all recipes, beside compiled bf16 and torchao's; what a
#                        recipe costs in loss the trainer tells: profiles/fp8.md has the commands
#   steps           430  forward and backward of Qwen2.5 0.5B to 7B at sequences of 1,024: fused and compiled, all
#                        kept, in turns
#   steps-products  430  the same keeping products
#   llama-steps      45  forward and backward of llama3-8b at 8,192 tokens: keeping all, keeping products, compiled
#   accumulate       60  a step of the same keeping all, the optimizer once per 16 sequences
#
# Peers need liger-kernel, cut-cross-entropy and torchao (uv sync, or pip install), and those in CuTe DSL quack-kernels and
# nvidia-cutlass-dsl[cu13] (pip install); without them their rows say so. Parts up to quantize append to FOLDER/kernels,
# those with blocks but fp8 to FOLDER/fused, steps and accumulate to FOLDER/fused-steps, fp8, steps-products and
# llama-steps to folders of their own; uv run scripts/report.py --adopt FOLDER moves the rows to profiles/results/<gpu>/. PYTHON picks
# the interpreter (default: uv run). Ways that are compared follow each other, kernels in one process; blocks and steps
# take turns, since what is long runs at the power cap. Run nothing else on the host.
set -euo pipefail
folder=${1:?usage: scripts/measure_kernels.sh FOLDER PART...}
shift
read -r -a python <<<"${PYTHON:-uv run}"
kernels() { "${python[@]}" benchmarks/benchmark_kernels.py --format csv --out "$folder/kernels" "$@"; }
blocks() { "${python[@]}" benchmarks/benchmark_blocks.py --format csv --out "$folder/fused" --warmup 3 "$@"; }
model() { "${python[@]}" benchmarks/benchmark_model.py --format csv --dtype bf16 --attention hopper "$@"; }
in_background() { timeout 60 "${python[@]}" "benchmarks/benchmark_$1.py" "${@:2}" >"$log" 2>&1 & }
tokens=(4096 65536)
libraries=(quack liger liger-cute)
norms_and_passes=(rms_norm add_rms_norm swiglu rotary)
levels=(input attention products all)
leaderboard=(--size leaderboard-8b --context-length 32768)
llama=(--size llama3-8b --context-length 8192 --batch-size 2)
steps=("0.5b 32" "1.5b 16" "3b 8" "7b 4") # sizes of Qwen2.5, and sequences
turns() { # folder, and what blocks keep
  for step in "${steps[@]}"; do
    read -r size batch <<<"$step"
    model --out "$folder/$1" --size "qwen2.5-$size" --batch-size "$batch" --context-length 1024 --mode backward \
      --kernels fused --keep "$2" --peer-compile on --warmup 3 --steps 70 --repeat 2
  done
}
# Both caches at one place, whether torch.compile runs in a process or not.
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-${TMPDIR:-/tmp}/torchinductor_$(id -un)}
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$TORCHINDUCTOR_CACHE_DIR/triton/0}

for part in "$@"; do
  case "$part" in
    compile)
      log=${COMPILE_LOG:-/dev/null}
      export TORCHINDUCTOR_COMPILE_THREADS=1
      for kernel in "${norms_and_passes[@]}"; do
        for models in "qwen2.5-0.5b qwen2.5-1.5b" "qwen2.5-3b qwen2.5-7b" "llama3-8b qwen2.5-14b"; do
          # shellcheck disable=SC2086 # several words
          in_background kernels --how ours compiled liger --samples 1 --kernel "$kernel" --size $models
        done
        in_background kernels --how compiled --samples 1 --kernel "$kernel" --size llama3-8b --rows "${tokens[@]}"
      done
      in_background kernels --how ours compiled --samples 1 --kernel adamw grad_norm column_sums
      in_background kernels --how ours compiled liger --samples 1 --kernel linear_cross_entropy --rows 32768 \
        --size llama3-8b
      wait
      unset TORCHINDUCTOR_COMPILE_THREADS
      # Where torch.compile chose between kernels by their times, those were not alone: it chooses again.
      find "$TORCHINDUCTOR_CACHE_DIR" -name '*.best_config' -delete ;;
    widths)
      kernels --kernel "${norms_and_passes[@]}" adamw grad_norm column_sums ;;
    tokens)
      kernels --kernel "${norms_and_passes[@]}" --size llama3-8b --rows "${tokens[@]}" ;;
    head)
      kernels --kernel linear_cross_entropy --rows 32768 --size llama3-8b --samples 20 \
        --how ours compiled liger liger-large-chunks ;;
    head-peers)
      kernels --kernel linear_cross_entropy --rows 32768 --size llama3-8b --samples 20 \
        --how eager cut-cross-entropy ;;
    head-widths)
      kernels --kernel linear_cross_entropy --rows 16384 --samples 20 ;;
    peers)
      kernels --kernel rms_norm add_rms_norm adamw --size llama3-8b
      kernels --kernel cross_entropy --rows 8192 --vocabulary 131072 --samples 20 \
        --how ours compiled "${libraries[@]}" ;;
    peers-head)
      kernels --kernel linear_cross_entropy --size llama3-8b --rows 8192 --vocabulary 131072 --samples 20 \
        --how ours compiled liger-large-chunks "${libraries[@]}" ;;
    quantize)
      kernels --kernel absmax quantize quantize.transposed quantize_blocks rms_norm_quantize swiglu_quantize \
        transpose_bytes ;;
    leaderboard)
      blocks "${leaderboard[@]}" --how compiled "${levels[@]}" --steps 10 ;;
    llama)
      blocks "${llama[@]}" --how compiled "${levels[@]}" --steps 10 ;;
    qwen)
      for step in "${steps[@]}"; do
        read -r size batch <<<"$step"
        blocks --size "qwen2.5-$size" --context-length 1024 --batch-size "$batch" --how compiled "${levels[@]}" \
          --steps 10
      done ;;
    cudnn)
      blocks "${leaderboard[@]}" --attention sdpa-cudnn --how compiled --steps 10
      blocks "${llama[@]}" --attention sdpa-cudnn --how compiled --steps 10 ;;
    fp8)
      "${python[@]}" benchmarks/benchmark_fp8.py --format csv --out "$folder/fp8" ;;
    steps)
      turns fused-steps all ;;
    steps-products)
      turns fused-steps-products products ;;
    llama-steps)
      model --out "$folder/llama-steps" --size llama3-8b --batch-size 1 --context-length 8192 --mode backward \
        --kernels fused --keep all products --peer-compile on --warmup 2 --steps 4 ;;
    accumulate)
      model --out "$folder/fused-steps" --size llama3-8b --batch-size 1 --context-length 8192 --mode step \
        --accumulate 16 --optimizer fused --kernels fused --keep all --warmup 1 --steps 2 ;;
    *)
      echo "unknown part '$part': see the head of scripts/measure_kernels.sh" >&2
      exit 2 ;;
  esac
done
