#!/usr/bin/env bash
# A small model learns to run Python for arithmetic that it cannot do in its head: minutes on two CPU cores.
# Flags behind the command go to the reinforcement learning: examples/retool/run.sh --rollout-engine sglang
set -euo pipefail
cd "$(dirname "$0")/../.."
export PYTHONPATH=.
python=${PYTHON:-python}
run=${RUN_DIR:-runs/examples/retool}

"$python" examples/retool/data.py "$run"

"$python" train.py --config recipes/laptop/sft.yaml \
    --hf-checkpoint "$run/model" --prompt-data "$run/talks.jsonl" \
    --run-dir "$run/warm-up" --save "$run/warm-up/checkpoints" --save-hf "$run/warm-up/hf-{rollout_id}"

"$python" train.py --config recipes/laptop/tools.yaml \
    --hf-checkpoint "$run/warm-up/model" --prompt-data "$run/prompts.jsonl" \
    --eval-prompt-data held_out "$run/held_out.jsonl" \
    --run-dir "$run/rl" --save "$run/rl/checkpoints" --save-hf "$run/rl/hf-{rollout_id}" "$@"

"$python" examples/retool/data.py tell "$run/rl"
