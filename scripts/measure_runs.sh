#!/usr/bin/env bash
# Train what profiles/runs/<gpu> holds: whole runs from text to samples, on one GPU.
#
#   scripts/measure_runs.sh FOLDER PART...
#
#   part       seconds  what
#   100m           640  100M parameters of Qwen2.5's shape from scratch on the bytes of Python's standard library, then text
#                       that the model writes; STEPS, 2,600 by default, of 131,072 tokens: ten minutes at 570,000 tokens/s
#   muon           480  AdamW and Muon at three learning rates each, 400 steps of 65,536 tokens; Muon also with a schedule of
#                       300 steps (three quarters); MUON_STEPS, "400 300" by default
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
model=(--size qwen-100m --data "$work/stdlib-bytes" --batch-size 32 --keep all --attention hopper --log-every 100)
long=(--total-batch-tokens 131072)
by_optimizer() { # its name, --optimizer, steps, then learning rates
  for rate in "${@:4}"; do
    local run="$1-$3-$rate"
    "${python[@]}" scripts/train.py "${model[@]}" --total-batch-tokens 65536 --out "$work/$run" --optimizer "$2" \
      --steps "$3" --learning-rate "$rate" --evaluate-every 20 --save-every None --no-export
    keep_log "$run" "$run"
  done
}
keep_log() { mkdir -p "$folder/$2" && cp "$work/$1/log.jsonl" "$folder/$2/log.jsonl"; }

for part in "$@"; do
  case "$part" in
    100m | muon | compared)
      [ -e "$work/stdlib-bytes" ] || "${python[@]}" scripts/tokenize_data.py --tokenizer bytes --out "$work/stdlib-bytes" ;;&
    100m)
      "${python[@]}" scripts/train.py "${model[@]}" "${long[@]}" --out "$work/100m" --steps "${STEPS:-2600}"
      keep_log 100m 100m
      for prompt in "def main(" "class " "import "; do
        "${python[@]}" scripts/sample.py "$work/100m" --prompt "$prompt" --max-tokens 400 --device cuda
      done | tee "$folder/samples.txt" ;;
    muon)
      by_optimizer adamw fused 400 6e-4 2e-3 6e-3
      for steps in ${MUON_STEPS:-400 300}; do
        by_optimizer muon muon "$steps" 2e-3 6e-3 2e-2
      done ;;
    compared)
      "${python[@]}" scripts/compare_with_transformers.py "${model[@]}" "${long[@]}" --out "$work/compared" --steps 400 --evaluate-every None
      keep_log compared/ours 100m-400
      keep_log compared/transformers 100m-400-transformers ;;
    *)
      echo "unknown part '$part': parts are 100m, muon, compared" >&2
      exit 2 ;;
  esac
done
