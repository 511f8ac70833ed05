#!/usr/bin/env bash
# A model that sorts one time in four is taught by preferences to sort always: about a minute and a half on a laptop CPU.
set -euo pipefail
cd "$(dirname "$0")/../.."
export PYTHONPATH=.
python=${PYTHON:-python}
run=${RUN_DIR:-runs/examples/dpo}

"$python" examples/digits.py model "$run/model"
"$python" examples/digits.py habits "$run/habits.jsonl"
"$python" examples/digits.py pairs "$run/pairs.jsonl"

# The model to start from: it knows four habits, each as likely as the others.
"$python" train.py \
    --hf-checkpoint "$run/model" --run-dir "$run/sft" --save "$run/sft/checkpoints" --save-interval 24 --save-hf "$run/sft/hf-{rollout_id}" \
    --rollout-function-path slime.rollout.sft_rollout.generate_rollout --debug-train-only \
    --loss-type sft_loss --calculate-per-token-loss --disable-compute-advantages-and-returns \
    --prompt-data "$run/habits.jsonl" --input-key messages --loss-mask-type qwen \
    --num-rollout 24 --rollout-batch-size 1280 --global-batch-size 64 \
    --use-dynamic-batch-size --max-tokens-per-gpu 8192 \
    --lr 4e-3 --min-lr 2e-4 --lr-decay-style cosine --lr-warmup-iters 20 --weight-decay 0 --adam-beta2 0.99
"$python" examples/digits.py score "$run/sft/hf-23"

# Twelve steps: trained for much longer, DPO lowers the log-probs of both answers, and the model unlearns what it knew.
"$python" train.py --config recipes/laptop/dpo.yaml \
    --hf-checkpoint "$run/sft/hf-23" --prompt-data "$run/pairs.jsonl" \
    --run-dir "$run/dpo" --save "$run/dpo/checkpoints" --save-hf "$run/dpo/hf-{rollout_id}"

"$python" examples/digits.py score "$run/dpo/hf-0"
