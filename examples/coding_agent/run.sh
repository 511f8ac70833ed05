#!/usr/bin/env bash
# A small model learns to repair functions with a wrong operator, with tests as the reward: minutes on two cores.
# Flags behind the command go to the reinforcement learning: examples/coding_agent/run.sh --rollout-engine sglang
set -euo pipefail
cd "$(dirname "$0")/../.."
export PYTHONPATH=.
python=${PYTHON:-python}
run=${RUN_DIR:-runs/examples/coding_agent}

"$python" examples/coding_agent/data.py "$run"

"$python" train.py --config recipes/laptop/sft.yaml --num-rollout 8 --save-interval 8 \
    --hf-checkpoint "$run/model" --prompt-data "$run/talks.jsonl" \
    --run-dir "$run/warm-up" --save "$run/warm-up/checkpoints" --save-hf "$run/warm-up/hf-{rollout_id}"

"$python" train.py \
    --hf-checkpoint "$run/warm-up/model" --prompt-data "$run/tasks.jsonl" --input-key prompt --label-key label \
    --custom-generate-function-path examples/coding_agent/agent.py:generate \
    --num-rollout 14 --rollout-batch-size 12 --n-samples-per-prompt 8 --global-batch-size 96 \
    --rollout-max-response-len 300 --rollout-shuffle --lr 1e-3 --min-lr 2e-4 --lr-decay-style cosine --weight-decay 0 \
    --use-dynamic-batch-size --max-tokens-per-gpu 8192 \
    --eval-prompt-data held_out "$run/held_out.jsonl" --eval-interval 7 --n-samples-per-eval-prompt 1 \
    --run-dir "$run/rl" --save "$run/rl/checkpoints" --save-interval 14 --save-hf "$run/rl/hf-{rollout_id}" "$@"

"$python" examples/coding_agent/data.py tell "$run/rl"
