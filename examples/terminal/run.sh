#!/usr/bin/env bash
# A small model learns which shell commands do what tasks ask for, with tests as the reward: minutes on two cores.
# REWARD=chance is the control, which trains on random rewards.
# Flags behind the command go to the reinforcement learning: examples/terminal/run.sh --rollout-engine sglang
set -euo pipefail
cd "$(dirname "$0")/../.."
export PYTHONPATH=.
python=${PYTHON:-python}
kind=${REWARD:-tests}
run=${RUN_DIR:-runs/examples/terminal-$kind}
case $kind in
    tests) function=generate ;;
    chance) function=generate_by_chance ;;
    *) echo "REWARD is $kind: tests or chance" >&2; exit 2 ;;
esac

"$python" examples/terminal/data.py "$run"

"$python" train.py --config recipes/laptop/sft.yaml --num-rollout 10 --save-interval 10 \
    --hf-checkpoint "$run/model" --prompt-data "$run/talks.jsonl" \
    --run-dir "$run/warm-up" --save "$run/warm-up/checkpoints" --save-hf "$run/warm-up/hf-{rollout_id}"

"$python" train.py \
    --hf-checkpoint "$run/warm-up/model" --prompt-data "$run/tasks.jsonl" --input-key prompt --label-key label \
    --custom-generate-function-path "examples/terminal/agent.py:$function" \
    --num-rollout 12 --rollout-batch-size 12 --n-samples-per-prompt 8 --global-batch-size 96 \
    --rollout-max-response-len 140 --rollout-shuffle --lr 1e-3 --min-lr 2e-4 --lr-decay-style cosine --weight-decay 0 \
    --use-dynamic-batch-size --max-tokens-per-gpu 8192 \
    --eval-prompt-data held_out "$run/held_out.jsonl" --eval-interval 6 --n-samples-per-eval-prompt 1 \
    --run-dir "$run/rl" --save "$run/rl/checkpoints" --save-interval 12 --save-hf "$run/rl/hf-{rollout_id}" "$@"

"$python" examples/terminal/data.py tell "$run/rl"
