#!/usr/bin/env bash
# A small model learns three tasks at once: minutes on two CPU cores. Needs: pip install 'slime-rl[reasoning-gym]'
# Flags behind the command go to the reinforcement learning: examples/reasoning_gym/run.sh --rollout-engine sglang
set -euo pipefail
cd "$(dirname "$0")/../.."
export PYTHONPATH=.
python=${PYTHON:-python}
run=${RUN_DIR:-runs/examples/reasoning_gym}

"$python" examples/reasoning_gym/data.py "$run"

"$python" train.py --config recipes/laptop/sft.yaml --num-rollout 20 --save-interval 20 \
    --hf-checkpoint "$run/model" --prompt-data "$run/talks.jsonl" \
    --run-dir "$run/warm-up" --save "$run/warm-up/checkpoints" --save-hf "$run/warm-up/hf-{rollout_id}"

"$python" train.py --hf-checkpoint "$run/warm-up/model" --apply-chat-template \
    --env reasoning_gym:number_sorting=2,spell_backward,palindrome_generation --env-args "$(cat "$run/settings.json")" \
    --num-rollout 24 --rollout-batch-size 24 --n-samples-per-prompt 8 --global-batch-size 192 \
    --rollout-max-response-len 10 --rollout-shuffle --lr 8e-4 --min-lr 1e-4 --lr-decay-style cosine --weight-decay 0 \
    --use-dynamic-batch-size --max-tokens-per-gpu 8192 \
    --eval-interval 6 --eval-env-num-items 96 --n-samples-per-eval-prompt 1 \
    --run-dir "$run/rl" --save "$run/rl/checkpoints" --save-interval 24 --save-hf "$run/rl/hf-{rollout_id}" "$@"

"$python" examples/reasoning_gym/data.py tell "$run/rl"
