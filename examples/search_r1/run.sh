#!/usr/bin/env bash
# A small model learns when and what to search: minutes on two CPU cores. Needs: pip install 'slime-rl[search]'
# Flags behind the command go to the reinforcement learning: examples/search_r1/run.sh --rollout-engine sglang
set -euo pipefail
cd "$(dirname "$0")/../.."
export PYTHONPATH=.
python=${PYTHON:-python}
run=${RUN_DIR:-runs/examples/search_r1}

"$python" examples/search_r1/data.py "$run"

"$python" train.py --config recipes/laptop/sft.yaml --num-rollout 16 --save-interval 16 \
    --hf-checkpoint "$run/model" --prompt-data "$run/talks.jsonl" \
    --run-dir "$run/warm-up" --save "$run/warm-up/checkpoints" --save-hf "$run/warm-up/hf-{rollout_id}"

"$python" train.py \
    --hf-checkpoint "$run/warm-up/model" --prompt-data "$run/prompts.jsonl" --input-key prompt --label-key label \
    --custom-generate-function-path examples/search_r1/agent.py:generate \
    --num-rollout 16 --rollout-batch-size 16 --n-samples-per-prompt 8 --global-batch-size 128 \
    --rollout-max-response-len 160 --rollout-shuffle --lr 8e-4 --min-lr 1e-4 --lr-decay-style cosine --weight-decay 0 \
    --use-dynamic-batch-size --max-tokens-per-gpu 8192 \
    --eval-prompt-data town "$run/town.jsonl" land "$run/land.jsonl" --eval-interval 4 --n-samples-per-eval-prompt 1 \
    --run-dir "$run/rl" --save "$run/rl/checkpoints" --save-interval 16 --save-hf "$run/rl/hf-{rollout_id}" "$@"

"$python" examples/search_r1/data.py tell "$run/rl"
