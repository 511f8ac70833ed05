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

"$python" train.py \
    --hf-checkpoint "$run/model" --run-dir "$run" --save "$run/checkpoints" --save-interval 10 --save-hf "$run/hf-{rollout_id}" \
    --rollout-function-path slime.rollout.sft_rollout.generate_rollout --debug-train-only \
    --loss-type sft_loss --calculate-per-token-loss --disable-compute-advantages-and-returns \
    --prompt-data "$run/talks.jsonl" --input-key messages --loss-mask-type qwen \
    --num-rollout 10 --rollout-batch-size 1280 --global-batch-size 64 \
    --use-dynamic-batch-size --max-tokens-per-gpu 8192 \
    --lr 4e-3 --min-lr 2e-4 --lr-decay-style cosine --lr-warmup-iters 10 --weight-decay 0 --adam-beta2 0.99

"$python" examples/digits.py score "$run/hf-9"
