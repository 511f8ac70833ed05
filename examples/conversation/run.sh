#!/usr/bin/env bash
# A small model learns to ask another one what it wants before it books: minutes on two CPU cores.
# REWARD=chance is the control, which trains on random rewards.
# Flags behind the command go to the reinforcement learning: examples/conversation/run.sh --num-rollout 20
set -euo pipefail
cd "$(dirname "$0")/../.."
export PYTHONPATH=.
python=${PYTHON:-python}
kind=${REWARD:-bookings}
run=${RUN_DIR:-runs/examples/conversation-$kind}
case $kind in
    bookings) function=generate ;;
    chance) function=generate_by_chance ;;
    *) echo "REWARD is $kind: bookings or chance" >&2; exit 2 ;;
esac

"$python" examples/conversation/data.py "$run"

for who in customer clerk; do
    "$python" train.py --config recipes/laptop/sft.yaml --num-rollout 10 --save-interval 10 \
        --hf-checkpoint "$run/$who-model" --prompt-data "$run/$who-talks.jsonl" \
        --run-dir "$run/$who" --save "$run/$who/checkpoints" --save-hf "$run/$who/hf-{rollout_id}"
done

"$python" train.py \
    --hf-checkpoint "$run/clerk/model" --prompt-data "$run/wishes.jsonl" --input-key prompt --label-key label \
    --rollout-engine embedded --sglang-config "$run/topology.yaml" \
    --custom-generate-function-path "examples/conversation/agent.py:$function" \
    --num-rollout 12 --rollout-batch-size 12 --n-samples-per-prompt 8 --global-batch-size 96 \
    --rollout-max-response-len 140 --rollout-shuffle --lr 1e-3 --min-lr 2e-4 --lr-decay-style cosine --weight-decay 0 \
    --use-dynamic-batch-size --max-tokens-per-gpu 8192 \
    --eval-prompt-data held_out "$run/held_out.jsonl" --eval-interval 6 --n-samples-per-eval-prompt 1 \
    --run-dir "$run/rl" --save "$run/rl/checkpoints" --save-interval 12 --save-hf "$run/rl/hf-{rollout_id}" "$@"

"$python" examples/conversation/data.py tell "$run/rl"
