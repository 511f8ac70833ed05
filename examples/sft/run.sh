#!/usr/bin/env bash
# Supervised fine-tuning on conversations of two turns: about a minute on a laptop CPU.
set -euo pipefail
cd "$(dirname "$0")/../.."
export PYTHONPATH=.
python=${PYTHON:-python}
run=${RUN_DIR:-runs/examples/sft}

"$python" examples/digits.py model "$run/model"
"$python" examples/digits.py talks "$run/talks.jsonl"
"$python" examples/digits.py score "$run/model"

"$python" train.py --config recipes/laptop/sft.yaml \
    --hf-checkpoint "$run/model" --prompt-data "$run/talks.jsonl" \
    --run-dir "$run" --save "$run/checkpoints" --save-hf "$run/hf-{rollout_id}"

"$python" examples/digits.py score "$run/hf-9"
