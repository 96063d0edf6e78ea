#!/usr/bin/env bash
# Train what profiles/runs/<gpu> holds: whole runs from text to samples, on one GPU.
#
#   scripts/measure_runs.sh FOLDER PART...
#
#   part       seconds  what
#   100m           640  100M parameters of Qwen2.5's shape from scratch on the bytes of Python's standard library, then text
#                       that the model writes; STEPS, 2,600 by default, of 131,072 tokens: ten minutes at 570,000 tokens/s
#   compared       400  its first 400 steps with a schedule of their own, by ours and by a plain loop over transformers' model
#
# Seconds are predicted; on an H200 3,100 steps took 590 s, and compared 261. Logs are copied to FOLDER/<run>/log.jsonl, and
# uv run scripts/report.py --adopt FOLDER
# moves them to profiles/runs/<gpu>/; what the model wrote is in FOLDER/samples.txt. Text and checkpoints stay in WORK
# (default: runs). The other loop needs transformers (uv sync). PYTHON picks the interpreter (default: uv run). Run nothing
# else on the host.
set -euo pipefail
folder=${1:?usage: scripts/measure_runs.sh FOLDER PART...}
shift
work=${WORK:-runs}
read -r -a python <<<"${PYTHON:-uv run}"
model=(
  --size qwen-100m --data "$work/stdlib-bytes" --total-batch-tokens 131072 --batch-size 32 --keep all --attention hopper
  --log-every 100
)
keep_log() { mkdir -p "$folder/$2" && cp "$work/$1/log.jsonl" "$folder/$2/log.jsonl"; }

for part in "$@"; do
  case "$part" in
    100m | compared)
      [ -e "$work/stdlib-bytes" ] || "${python[@]}" scripts/tokenize_data.py --tokenizer bytes --out "$work/stdlib-bytes" ;;&
    100m)
      "${python[@]}" scripts/train.py "${model[@]}" --out "$work/100m" --steps "${STEPS:-2600}"
      keep_log 100m 100m
      for prompt in "def main(" "class " "import "; do
        "${python[@]}" scripts/sample.py "$work/100m" --prompt "$prompt" --max-tokens 400 --device cuda
      done | tee "$folder/samples.txt" ;;
    compared)
      "${python[@]}" scripts/compare_with_transformers.py "${model[@]}" --out "$work/compared" --steps 400 --evaluate-every None
      keep_log compared/ours 100m-400
      keep_log compared/transformers 100m-400-transformers ;;
    *)
      echo "unknown part '$part': parts are 100m, compared" >&2
      exit 2 ;;
  esac
done
