#!/usr/bin/env bash
# A small model learns to sort from the scores of another small model: minutes on two CPU cores.
# JUDGE=blind is the control, whose judge sees no reference.
# Flags behind the command go to the reinforcement learning: examples/judge/run.sh --rollout-engine sglang
set -euo pipefail
cd "$(dirname "$0")/../.."
export PYTHONPATH=.
python=${PYTHON:-python}
kind=${JUDGE:-reference}
run=${RUN_DIR:-runs/examples/judge-$kind}

"$python" examples/judge/data.py "$run" "$kind"
"$python" examples/digits.py model "$run/model"

# The judge learns to score answers, the policy four habits of which one sorts.
"$python" train.py --config recipes/laptop/sft.yaml --num-rollout 20 --save-interval 20 \
    --hf-checkpoint "$run/judge-model" --prompt-data "$run/judgements.jsonl" \
    --run-dir "$run/judge" --save "$run/judge/checkpoints" --save-hf "$run/judge/hf-{rollout_id}"
"$python" examples/judge/data.py agree "$run" "$run/judge/hf-19"
"$python" train.py --config recipes/laptop/sft.yaml \
    --hf-checkpoint "$run/model" --prompt-data "$run/habits.jsonl" \
    --run-dir "$run/warm-up" --save "$run/warm-up/checkpoints" --save-hf "$run/warm-up/hf-{rollout_id}"

"$python" train.py \
    --hf-checkpoint "$run/warm-up/model" --prompt-data "$run/prompts.jsonl" --input-key prompt --label-key label \
    --rollout-engine embedded --sglang-config "$run/topology.yaml" \
    --rm-type judge --judge-model judge --judge-rubric "$run/rubric.txt" --judge-max-score 1 --limits judge-tokens=12 \
    --num-rollout 20 --rollout-batch-size 24 --n-samples-per-prompt 8 --global-batch-size 192 \
    --rollout-max-response-len 8 --rollout-shuffle --lr 4e-4 --min-lr 1e-4 --lr-decay-style cosine --weight-decay 0 \
    --use-dynamic-batch-size --max-tokens-per-gpu 8192 \
    --eval-config "$run/eval.yaml" --eval-interval 5 --n-samples-per-eval-prompt 1 \
    --run-dir "$run/rl" --save "$run/rl/checkpoints" --save-interval 20 --save-hf "$run/rl/hf-{rollout_id}" "$@"

"$python" examples/judge/data.py tell "$run/rl"
