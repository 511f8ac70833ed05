#!/usr/bin/env bash
# A small vision-language model looks at fields of a picture with a tool that returns pictures: minutes on two CPU cores.
# Flags behind the command go to the reinforcement learning: examples/geo_zoom/run.sh --num-rollout 16
set -euo pipefail
cd "$(dirname "$0")/../.."
export PYTHONPATH=.
python=${PYTHON:-python}
run=${RUN_DIR:-runs/examples/geo_zoom}

"$python" examples/geo_zoom/data.py "$run"

# Both towers start at random and are trained, here and in what follows.
"$python" train.py --config recipes/laptop/sft.yaml --num-rollout 8 --save-interval 8 --rollout-batch-size 640 --global-batch-size 32 \
    --hf-checkpoint "$run/model" --prompt-data "$run/talks.jsonl" --multimodal-keys '{"image": "images"}' \
    --lr 2e-3 --run-dir "$run/warm-up" --save "$run/warm-up/checkpoints" --save-hf "$run/warm-up/hf-{rollout_id}"

"$python" train.py \
    --hf-checkpoint "$run/warm-up/model" --env examples/geo_zoom/zoom.py:Zoom --apply-chat-template --rollout-engine embedded \
    --max-turns 2 --turn-max-response-len 4 --rollout-max-response-len 32 \
    --num-rollout 24 --rollout-batch-size 16 --n-samples-per-prompt 8 --global-batch-size 128 \
    --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --weight-decay 0 \
    --use-dynamic-batch-size --max-tokens-per-gpu 8192 --eval-interval 8 --eval-env-num-items 128 \
    --run-dir "$run/rl" --save "$run/rl/checkpoints" --save-interval 24 --save-hf "$run/rl/hf-{rollout_id}" "$@"

"$python" examples/geo_zoom/data.py tell "$run/rl"
