#!/usr/bin/env bash
# Measure what profiles/results/<gpu>/training holds: steady tokens per second of whole runs, on one GPU.
#
#   scripts/measure_training.sh FOLDER PART...
#
# Parts that are compared come from one host. Sequences are of 1,024 tokens, steps of 524,288; beside torchao of 131,072
# and for 7B on ranks of 262,144, as 7B would else take more than ten minutes. Seconds on an H200 by arithmetic: at least
# 60 of steps after the warm-up at the rates of profiles/results/h200/fused-steps, with fp8 as slow as bf16; for a run 15
# to begin, for a peer 30 more to compile a block, or 3 for each where the whole model is compiled:
#
#   part          seconds  what
#   0.5b              355  Qwen2.5-0.5B at 32 sequences: ours, transformers compiled, and with Liger
#   1.5b              405  Qwen2.5-1.5B at 16
#   3b                500  Qwen2.5-3B at 16
#   7b                240  Qwen2.5-7B at 8, keeping products: ours; few and long steps
#   7b-peers          450  the same: transformers compiled, and with Liger
#   ways-0.5b         360  0.5B, 20 s each: ours, and transformers in each way that is not torchao's
#   ways-1.5b         600  1.5B, as measured: a model that is compiled whole takes a minute to begin
#   8b-e4m3           240  Llama 3 8B at 8,192 tokens in fp8, two sequences at a time, by measured kernels of matmuls
#   keep               80  0.5B keeping products
#   graph              90  0.5B as a CUDA graph
#   fp8-0.5b          165  products of blocks in fp8, and in bf16 in the same command: 0.5B at 32
#   fp8-1.5b          100  in fp8 alone, as large micro-batches do not fit in bf16: 1.5B at 64
#   fp8-3b            110  3B at 32
#   fp8-7b            480  in both: 7B at 16, keeping products
#   torchao-0.5b      370  bf16, fp8, and torchao's by tensor and by row in the same command: 0.5B at 32
#   torchao-1.5b      385  1.5B at 32
#   torchao-3b        405  3B at 16
#   torchao-7b        460  7B at 16, ours keeping products
#   80gb              260  the fastest that fits 80 GB, 40 s each, which llm.q published on an H100: 0.5B and 1.5B in fp8
#                          and bf16; at 0.5B by measured kernels of matmuls
#   80gb-large        420  the same of 3B and 7B with moments on the host, 7B in bf16 with steps of 262,144 tokens; but 3B
#                          in fp8 with all on the GPU, by measured kernels of matmuls
#   80gb-host         580  14B in bf16, and Llama 3 8B at 8,192 tokens in fp8, with moments on the host
#   finetuning        390  0.5B, micro-batches of 16 and 32 rows of 2,048 tokens, steps of 131,072, 20 s each:
#                          pre-training, packed conversations, and these by TRL's SFTTrainer, also compiled; ours in fp8
#   lora              170  7B, one row at a time: adapters of rank 16 in bf16 and in e4m3, in a CUDA graph, beside
#                          forward and input gradients alone in bf16
#   choice-0.5b       130  0.5B by six settings of --batch-size and --keep, 8 s each; train.py chooses one of them
#   choice-1.5b       130  1.5B
#   choice-3b         150  3B
#   choice-7b         200  7B
#   choice-14b        290  14B, with states on the host where the card asks for it
#   ranks-0.5b        400  0.5B at 32 on two GPUs: ZeRO-1, ZeRO-3 in two ways, apart; and on one (FOLDER/training-2)
#   ranks-1.5b        430  the same of 1.5B at 16
#   ranks-7b          525  of 7B at 8, keeping products
#   ranks-fp8-0.5b    400  products of blocks in fp8: 0.5B at 32
#   ranks-fp8-1.5b    430  1.5B at 16
#   ranks-fp8-7b      525  7B at 8, keeping products
#
# CARD_GB is the memory of the card for choice-*: 141 (default) or 80. RANKS names the worlds of the last six (default:
# 1 2), which come from one host; FOLDER/training-N has those of up to N ranks. DURATION is the least time of the steps
# after the warm-up (default: 60, in seconds).
#
# Data are random tokens of the model's vocabulary, which the rows say. Peers need transformers, liger-kernel and torchao
# (uv sync), and trl, datasets and flash-attn-4 (pip install); without them their rows say so. Rows are appended to
# FOLDER/training, those of finetuning and lora to FOLDER/finetuning, of choice-* to FOLDER/choice; uv run
# scripts/report.py --adopt FOLDER moves them to profiles/results/<gpu>/. PYTHON picks the interpreter (default: uv run).
# Run nothing else on the host.
set -euo pipefail
folder=${1:?usage: scripts/measure_training.sh FOLDER PART...}
shift
read -r -a python <<<"${PYTHON:-uv run}"
into() {
  "${python[@]}" benchmarks/benchmark_training.py --format csv --out "$folder/$1" --seconds "${DURATION:-60}" "${@:2}"
}
ours=(--keep all --cuda-graph off --warmup 2)
training() { into training "${ours[@]}" --kernels fused "$@"; }
read -r -a worlds <<<"${RANKS:-1 2}"
most=$(printf '%s\n' "${worlds[@]}" | sort -n | tail -1)
in_rows_of_2048() { # finetuning and lora: into a file of their own, as their tokens are not those of pre-training
  DURATION=${DURATION:-20} into finetuning "${ours[@]}" --kernels fused --context-length 2048 "$@"
}
ways=(ours transformers transformers-cudnn transformers-liger transformers-liger-cudnn transformers-liger-whole)
on_80gb() { # size, then the shape and the recipe
  DURATION=${DURATION:-40} into training "${ours[@]}" --kernels fused --how ours --warmup 1 --size "$1" "${@:2}"
}
on_80() { [ "${CARD_GB:-141}" = 80 ]; }
by_hand() { # size and micro-batch, then what is compared
  DURATION=${DURATION:-8} into choice --cuda-graph off --warmup 2 --kernels fused --how ours --size "qwen2.5-$1" \
    --total-batch-tokens 65536 --batch-size "$2" "${@:3}"
}
in_two() { # size, then two micro-batches on a card of 141 GB and two on one of 80
  local batches=("${@:2:2}")
  on_80 && batches=("${@:4:2}")
  for batch in "${batches[@]}"; do by_hand "$1" "$batch" --keep all all-norm products; done
}
in_worlds() { # size, then the recipe
  local shape=(--batch-size 16)
  case "$1" in 0.5b) shape=(--batch-size 32) ;; 7b) shape=(--batch-size 8 --keep products --total-batch-tokens 262144) ;; esac
  into "training-$most" "${ours[@]}" --kernels fused --size "qwen2.5-$1" "${shape[@]}" "${@:2}" --how ours --zero 1 3 \
    --gather-by collectives copies --apart off on --world-size "${worlds[@]}"
}
in_fp8() { # size, then what is compared
  local shape=(--batch-size 32)
  case "$1" in 3b) shape=(--batch-size 16) ;; 7b) shape=(--batch-size 16 --keep products) ;; esac
  training --size "qwen2.5-$1" "${shape[@]}" "${@:2}"
}

for part in "$@"; do
  case "$part" in
    0.5b)
      training --size qwen2.5-0.5b --batch-size 32 ;;
    1.5b)
      training --size qwen2.5-1.5b --batch-size 16 ;;
    3b)
      training --size qwen2.5-3b --batch-size 16 ;;
    7b)
      training --size qwen2.5-7b --batch-size 8 --keep products --how ours ;;
    7b-peers)
      training --size qwen2.5-7b --batch-size 8 --how transformers transformers-liger ;;
    ways-0.5b)
      DURATION=${DURATION:-20} training --size qwen2.5-0.5b --batch-size 32 --how "${ways[@]}" ;;
    ways-1.5b)
      DURATION=${DURATION:-20} training --size qwen2.5-1.5b --batch-size 16 --how "${ways[@]}" ;;
    8b-e4m3)
      training --size llama3-8b --context-length 8192 --batch-size 2 --recipe e4m3 --how ours --matmul-kernels measured ;;
    keep)
      training --size qwen2.5-0.5b --batch-size 32 --how ours --keep products ;;
    graph)
      training --size qwen2.5-0.5b --batch-size 32 --how ours --cuda-graph on --warmup 5 ;;
    80gb)
      on_80gb qwen2.5-0.5b --batch-size 32 --matmul-kernels measured --recipe e4m3
      on_80gb qwen2.5-0.5b --batch-size 32 --matmul-kernels measured
      on_80gb qwen2.5-1.5b --batch-size 32 --recipe e4m3
      on_80gb qwen2.5-1.5b --batch-size 16 ;;
    80gb-large)
      on_80gb qwen2.5-3b --batch-size 16 --matmul-kernels measured --recipe e4m3
      on_80gb qwen2.5-3b --batch-size 16 --offload m-v
      on_80gb qwen2.5-7b --batch-size 8 --offload m-v --recipe e4m3
      on_80gb qwen2.5-7b --batch-size 8 --offload m-v --total-batch-tokens 262144 ;;
    80gb-host)
      on_80gb qwen2.5-14b --batch-size 4 --keep products --offload m-v
      on_80gb llama3-8b --context-length 8192 --batch-size 1 --offload m-v --recipe e4m3 ;;
    finetuning)
      for batch in 16 32; do
        in_rows_of_2048 --size qwen2.5-0.5b --batch-size "$batch" --total-batch-tokens 131072 --conversations off packed \
          --attention hopper --how ours trl-flash trl-flash-compiled
      done
      in_rows_of_2048 --size qwen2.5-0.5b --batch-size 32 --total-batch-tokens 131072 --conversations packed \
        --attention hopper --recipe e4m3 --how ours ;;
    lora)
      in_rows_of_2048 --size qwen2.5-7b --batch-size 1 --total-batch-tokens 32768 --recipe stored e4m3 --lora-rank 16 \
        --keep products all --cuda-graph on --warmup 5 --how ours input-gradients ;;
    choice-0.5b)
      in_two 0.5b 32 64 32 64 ;;
    choice-1.5b)
      in_two 1.5b 16 32 16 32 ;;
    choice-3b)
      in_two 3b 16 32 8 16 ;;
    choice-7b)
      in_two 7b 8 16 2 4 ;;
    choice-14b)
      if on_80; then
        by_hand 14b 4 --keep all-norm-swiglu --offload m-v
        by_hand 14b 2 --keep all all-norm-swiglu --offload m-v
        by_hand 14b 1 --keep all all-norm-swiglu --offload m-v
        by_hand 14b 8 --keep products-ffn --offload m-v
      else
        by_hand 14b 4 --keep all-norm all-norm-swiglu --offload residual
        by_hand 14b 4 --keep all-norm-swiglu
        by_hand 14b 2 --keep all all-norm
        by_hand 14b 8 --keep all --offload m-v
      fi ;;
    fp8-0.5b|fp8-7b)
      in_fp8 "${part#fp8-}" --how ours --recipe stored e4m3 ;;
    fp8-1.5b)
      training --size qwen2.5-1.5b --batch-size 64 --how ours --recipe e4m3 ;;
    fp8-3b)
      training --size qwen2.5-3b --batch-size 32 --how ours --recipe e4m3 ;;
    torchao-0.5b|torchao-1.5b|torchao-3b|torchao-7b)
      in_fp8 "${part#torchao-}" --how ours torchao-tensorwise torchao-rowwise --recipe stored e4m3 \
        --total-batch-tokens 131072 ;;
    ranks-fp8-0.5b|ranks-fp8-1.5b|ranks-fp8-7b)
      in_worlds "${part#ranks-fp8-}" --recipe e4m3 ;;
    ranks-0.5b|ranks-1.5b|ranks-7b)
      in_worlds "${part#ranks-}" ;;
    *)
      echo "unknown part '$part': see the head of scripts/measure_training.sh" >&2
      exit 2 ;;
  esac
done
