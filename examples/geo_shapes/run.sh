#!/usr/bin/env bash
# A small vision-language model learns to count red shapes in pictures: minutes on two CPU cores.
# Flags behind the command go to the reinforcement learning: examples/geo_shapes/run.sh --rollout-engine sglang
set -euo pipefail
cd "$(dirname "$0")/../.."
export PYTHONPATH=.
python=${PYTHON:-python}
run=${RUN_DIR:-runs/examples/geo_shapes}

"$python" examples/geo_shapes/data.py "$run"

# Both towers start at random and are trained, here and in what follows.
"$python" train.py --config recipes/laptop/sft.yaml --num-rollout 12 --save-interval 12 --rollout-batch-size 640 --global-batch-size 32 \
    --hf-checkpoint "$run/model" --prompt-data "$run/talks.jsonl" --multimodal-keys '{"image": "images"}' \
    --lr 2e-3 --run-dir "$run/warm-up" --save "$run/warm-up/checkpoints" --save-hf "$run/warm-up/hf-{rollout_id}"

"$python" train.py \
    --hf-checkpoint "$run/warm-up/model" --prompt-data "$run/prompts.jsonl" --input-key prompt --label-key label \
    --multimodal-keys '{"image": "images"}' --apply-chat-template --rollout-engine embedded \
    --custom-rm-path slime.cli.quickstart.rewards.exact_match \
    --num-rollout 64 --rollout-batch-size 16 --n-samples-per-prompt 8 --global-batch-size 128 \
    --rollout-max-response-len 4 --rollout-shuffle --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --weight-decay 0 \
    --use-dynamic-batch-size --max-tokens-per-gpu 8192 \
    --eval-prompt-data held_out "$run/held_out.jsonl" other_picture "$run/other_picture.jsonl" --eval-interval 16 \
    --run-dir "$run/rl" --save "$run/rl/checkpoints" --save-interval 64 --save-hf "$run/rl/hf-{rollout_id}" "$@"

"$python" examples/geo_shapes/data.py tell "$run/rl"
