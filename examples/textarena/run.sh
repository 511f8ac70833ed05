#!/usr/bin/env bash
# A small model learns a game by playing itself: minutes on two CPU cores. Needs: pip install 'slime-rl[textarena]'
# Flags behind the command go to the reinforcement learning: examples/textarena/run.sh --rollout-engine sglang
set -euo pipefail
cd "$(dirname "$0")/../.."
export PYTHONPATH=.
python=${PYTHON:-python}
run=${RUN_DIR:-runs/examples/textarena}
players=examples/textarena/players.py

"$python" "$players" "$run"

"$python" train.py --config recipes/laptop/sft.yaml --num-rollout 8 --save-interval 8 \
    --hf-checkpoint "$run/model" --prompt-data "$run/talks.jsonl" \
    --run-dir "$run/warm-up" --save "$run/warm-up/checkpoints" --save-hf "$run/warm-up/hf-{rollout_id}"

"$python" train.py --hf-checkpoint "$run/warm-up/model" --apply-chat-template \
    --env textarena:Nim-v0 --env-args "{\"*\": {\"piles\": [2, 3], \"eval_opponent\": \"$players:random_move\"}}" \
    --num-rollout 32 --rollout-batch-size 8 --n-samples-per-prompt 16 --global-batch-size 128 \
    --max-turns 8 --turn-max-response-len 4 --rollout-max-response-len 300 \
    --rollout-shuffle --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --weight-decay 0 \
    --use-dynamic-batch-size --max-tokens-per-gpu 8192 \
    --eval-interval 8 --eval-env-num-items 128 --n-samples-per-eval-prompt 1 \
    --run-dir "$run/rl" --save "$run/rl/checkpoints" --save-interval 32 --save-hf "$run/rl/hf-{rollout_id}" "$@"

"$python" "$players" tell "$run/rl"
"$python" "$players" match "$run/rl/hf-31" "$run/warm-up/model"
