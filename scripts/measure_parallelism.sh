#!/usr/bin/env bash
# Measure what profiles/results/<machine>/ and profiles/digests/<gpu>/ hold in mesh-* and replicas: on one host, ranks that
# share a batch, and replicas that may die or that average seldom (DiLoCo).
#
#   scripts/measure_parallelism.sh FOLDER PART...
#
# Nothing else may run on the host. A part is a command or two, so that what is compared comes from one host and commit.
# Seconds on H200s: a cell of llama3-8b takes 15 to 25, torch's 40, the first of a command 35.
#
#   part                  GPUs  seconds  what (llama3-8b's shape, bf16)
#   mesh-tensor              2      150  8,192 tokens: FSDP and tensor ranks, recorded
#   mesh-tensor-copies       2       75  8,192 tokens: tensor ranks by collectives and by copies
#   mesh-peers               2      240  8,192 tokens: tensor ranks beside torch's
#   mesh-context             2      420  65,536 and 131,072 tokens: attention on context ranks; whole steps of 65,536
#   mesh-context-peers       2      240  attention again, beside torch's
#   mesh-long                2      300  whole steps of 131,072 tokens
#   mesh-short               2      140  1,024 to 4,096 tokens: FSDP, tensor and context ranks
#   mesh-short-graph         2       70  the same by tensor ranks whose step is a CUDA graph
#   mesh-pipeline            2      180  4 micro-batches of 4,096 tokens: every schedule, recorded
#   mesh-pipeline-many       2      260  8 and 16 of them: the fastest schedules beside 1F1B, recorded
#   mesh-pipeline-copies     2      280  1F1B and ZBV by messages and by copies, beside torch's
#   mesh-pipeline-four       4      280  four stages, and one GPU
#   mesh-four                4      130  8,192 tokens: FSDP, tensor and context ranks on four
#   mesh-four-long           4      400  whole steps of 131,072 tokens; one GPU, too, which needs 141 GB
#
#   failures            CPU      180  tiny on two cores: replicas, some killed, beside a restart from a checkpoint
#   diloco              CPU     1100  tiny: DiLoCo on one, two and four replicas averaging every H steps for five H; data
#                                     parallelism
#   diloco-large        CPU     1000  the same at 8,192 tokens a step, every 100 after 400 steps of data parallelism
#   failures-forty      CPU      600  tiny on four replicas, 2,000 steps, 40 kills
#   replicas              2      160  0.5B over NCCL; one replica is killed and heals while the other trains
#   replicas-7b           2      170  the same in the shape of 7B, 40 GB of state
#   replicas-four         4      150  7B in two replicas of two GPUs with FSDP inside, one killed; then 0.5B by DiLoCo
#   replicas-diloco       2      500  the 100M model: data parallelism, and DiLoCo every 100 steps after 400 of 900; one pass
#                                     over 118 million tokens, as four over the standard library's nine million were
#                                     learned by heart. DATA is their folder. Ours had all Python files of an environment
#                                     with torch 2.11: tokenize_data.py --suffix .py --out data/packages --input SITE-PACKAGES
#
# The last eight write to FOLDER/replicas (adopt those of CPUs with --machine cpu), every other part to FOLDER/PART;
# uv run scripts/report.py --adopt FOLDER moves rows and pictures to profiles/. PYTHON is how scripts are run (default:
# uv run).
set -euo pipefail
folder=${1:?usage: scripts/measure_parallelism.sh FOLDER PART...}
shift
read -r -a python <<<"${PYTHON:-uv run}"

measure() { # into the part's folder; a cell that takes longer than its time-out is a row
  "${python[@]}" benchmarks/benchmark_parallelism.py --format csv --out "$folder/$part" --device cuda --dtype bf16 \
    --kernels fused --attention hopper --optimizer fused --batch-size 1 --timeout 150 "$@"
}

replicas() { # a benchmark, and its options
  RUST_LOG=error "${python[@]}" "benchmarks/benchmark_$1.py" --format csv --out "$folder/replicas" "${@:2}"
}
apart() { replicas diloco --evaluate-every 100 "$@"; }

for part in "$@"; do
  products=(--size llama3-8b --weights fsdp --keep products)
  long=(--size llama3.1-8b --tensor 1)
  stages=(--size llama3-8b --tensor 1 --context 1 --context-length 4096 --warmup 2)
  case "$part" in
    mesh-tensor)
      measure "${products[@]}" --context-length 8192 --world-size 1 2 --tensor 1 2 --context 1 \
        --tensor-by collectives copies --warmup 4 --steps 30 --trace "$folder/$part" ;;
    mesh-tensor-copies)
      measure "${products[@]}" --context-length 8192 --world-size 2 --tensor 2 --context 1 --tensor-by collectives copies \
        --warmup 4 --steps 40 ;;
    mesh-peers)
      peers=("${products[@]}" --context-length 8192 --context 1 --warmup 4 --steps 20 --peer)
      measure "${peers[@]}" --world-size 1 --tensor 1
      measure "${peers[@]}" --world-size 2 --tensor 2 --tensor-by collectives copies ;;
    mesh-context | mesh-context-peers)
      attention=("${long[@]}" --part attention --context-length 65536 131072 --world-size 1 2 --context 1 2)
      if [ "$part" = mesh-context-peers ]; then
        measure "${attention[@]}" --context-order zigzag gathered --warmup 2 --steps 5 --peer
      else
        measure "${attention[@]}" --context-order zigzag ring gathered --warmup 2 --steps 5
        for n in 1 2; do
          measure "${long[@]}" --context-length 65536 --keep input --weights ddp --warmup 1 --steps 2 \
            --world-size "$n" --context "$n"
        done
      fi ;;
    mesh-long)
      for n in 1 2; do
        measure "${long[@]}" --context-length 131072 --keep input --weights ddp --warmup 1 --steps "$n" \
          --world-size "$n" --context "$n"
      done ;;
    mesh-short | mesh-short-graph)
      short=("${products[@]}" --context-length 1024 2048 4096 --steps 12)
      if [ "$part" = mesh-short ]; then
        measure "${short[@]}" --world-size 1 2 --tensor 1 2 --context 1 2 --tensor-by copies --warmup 3
      else
        part=mesh-short
        for n in 1 2; do measure "${short[@]}" --world-size "$n" --tensor "$n" --context 1 --cuda-graph on --warmup 6; done
      fi ;;
    mesh-pipeline | mesh-pipeline-many)
      case "$part" in
        mesh-pipeline) batches=(--accumulate 4 --steps 6) schedules=(gpipe 1f1b interleaved zb-h1 zbv dualpipev) ;;
        mesh-pipeline-many) batches=(--accumulate 8 16 --steps 5) schedules=(1f1b zbv dualpipev) ;;
      esac
      part=mesh-pipeline
      measure "${stages[@]}" "${batches[@]}" --world-size 1
      measure "${stages[@]}" "${batches[@]}" --world-size 2 --pipeline 2 --pipeline-schedule "${schedules[@]}" \
        --pipeline-by copies --trace "$folder/$part" ;;
    mesh-pipeline-copies)
      measure "${stages[@]}" --world-size 2 --pipeline 2 --accumulate 4 8 --steps 5 --keep products \
        --pipeline-schedule 1f1b zbv --pipeline-by messages copies --peer ;;
    mesh-pipeline-four)
      measure "${stages[@]}" --world-size 4 1 --pipeline 4 1 --pipeline-by copies --accumulate 8 16 --steps 5 \
        --pipeline-schedule 1f1b zb-h1 zbv dualpipev ;;
    mesh-four)
      measure "${products[@]}" --context-length 8192 --world-size 4 1 --tensor 2 4 1 --context 1 4 \
        --tensor-by copies collectives --warmup 3 --steps 10 ;;
    mesh-four-long)
      for n in 4 2; do
        measure "${long[@]}" --context-length 131072 --keep input --weights fsdp --warmup 1 --steps 1 \
          --world-size 4 --context "$n"
      done
      measure "${long[@]}" --context-length 131072 --keep input --weights fsdp --warmup 1 --steps 1 --world-size 1 ;;
    failures)
      replicas failures --device cpu --size tiny --replicas 2 --context-length 128 --batch-size 2 --steps 400 --kills 8 \
        --save-every 50 --restarts 3 --timeout 240 ;;
    diloco)
      tiny=(--device cpu --size tiny --total-batch-tokens 1024 --context-length 128 --steps 1500 --timeout 600)
      apart "${tiny[@]}" --replicas 1 2 4 --agree-every 1 10 30 100 500 ;;
    diloco-large)
      apart --device cpu --size tiny --total-batch-tokens 8192 --batch-size 32 --context-length 128 --steps 1000 \
        --schedule wsd --replicas 2 --agree-every 100 --first-steps 400 --outer-learning-rate 1.0 --outer-momentum 0.7 \
        --timeout 900 ;;
    failures-forty)
      replicas failures --device cpu --size tiny --how replicas --replicas 4 --context-length 128 --batch-size 1 \
        --steps 2000 --kills 40 --save-every 500 --timeout 900 ;;
    replicas | replicas-7b)
      case "$part" in
        replicas) shape=(--size qwen2.5-0.5b --batch-size 16 --steps 160) ;;
        replicas-7b) shape=(--size qwen2.5-7b --batch-size 4 --steps 80) ;;
      esac
      replicas failures --device cuda --how replicas --replicas 2 "${shape[@]}" --kills 1 --seed 1 --save-every 0 \
        --timeout 200 ;;
    replicas-four)
      replicas failures --device cuda --how replicas --replicas 2 --ranks-per-replica 2 --zero 3 --size qwen2.5-7b \
        --batch-size 4 --steps 80 --kills 1 --seed 1 --save-every 0 --timeout 150
      "${python[@]}" scripts/train.py --size qwen2.5-0.5b --replicas 2 --ranks-per-replica 2 --zero 3 --agree diloco \
        --agree-every 100 --batch-size 8 --context-length 1024 --steps 300 --evaluate-every 300 --no-export \
        --fail "kill 1 at 120" --out "$folder/diloco-four" ;;
    replicas-diloco)
      apart --device cuda --size qwen-100m --replicas 2 --steps 900 --total-batch-tokens 131072 --schedule wsd \
        --data "${DATA:-stdlib}" --agree-every 100 --first-steps 400 --outer-learning-rate 1.0 --outer-momentum 0.7 \
        --timeout 300 ;;
    *)
      echo "unknown part '$part': see the head of scripts/measure_parallelism.sh" >&2
      exit 2 ;;
  esac
done
