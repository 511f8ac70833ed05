#!/usr/bin/env bash
# A Bradley-Terry reward model that tells a sorted answer from another: about a minute on a laptop CPU.
set -euo pipefail
cd "$(dirname "$0")/../.."
export PYTHONPATH=.
python=${PYTHON:-python}
run=${RUN_DIR:-runs/examples/reward_model}

"$python" examples/digits.py model "$run/model"
"$python" examples/digits.py pairs "$run/pairs.jsonl"
"$python" examples/digits.py judge "$run/model"

"$python" train.py \
    --hf-checkpoint "$run/model" --run-dir "$run" --save "$run/checkpoints" --save-interval 8 --save-hf "$run/hf-{rollout_id}" \
    --rollout-function-path slime.rollout.preference_rollout.generate_rollout --debug-train-only --loss-type rm_loss \
    --prompt-data "$run/pairs.jsonl" --input-key chosen --label-key rejected --loss-mask-type qwen \
    --num-rollout 8 --rollout-batch-size 640 --global-batch-size 32 \
    --use-dynamic-batch-size --max-tokens-per-gpu 8192 \
    --lr 2e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-iters 10 --weight-decay 0 --adam-beta2 0.99

"$python" examples/digits.py judge "$run/hf-7"
