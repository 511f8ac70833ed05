#!/usr/bin/env bash
# On-policy distillation: a student learns from a teacher that was trained for longer. No reward and no right answer is used.
# A minute and a half on a laptop CPU, half of it to make student and teacher.
set -euo pipefail
cd "$(dirname "$0")/../.."
export PYTHONPATH=.
python=${PYTHON:-python}
run=${RUN_DIR:-runs/examples/opd}

"$python" examples/digits.py model "$run/model"
"$python" examples/digits.py talks "$run/talks.jsonl"
"$python" examples/digits.py prompts "$run/prompts.jsonl"

# One supervised run makes both: the student is what it has learnt after 80 steps, the teacher what it has learnt after 200.
"$python" train.py \
    --hf-checkpoint "$run/model" --run-dir "$run/sft" --save "$run/sft/checkpoints" --save-interval 2 --save-hf "$run/sft/hf-{rollout_id}" \
    --rollout-function-path slime.rollout.sft_rollout.generate_rollout --debug-train-only \
    --loss-type sft_loss --calculate-per-token-loss --disable-compute-advantages-and-returns \
    --prompt-data "$run/talks.jsonl" --input-key messages --loss-mask-type qwen \
    --num-rollout 10 --rollout-batch-size 1280 --global-batch-size 64 \
    --use-dynamic-batch-size --max-tokens-per-gpu 8192 \
    --lr 4e-3 --min-lr 2e-4 --lr-decay-style cosine --lr-warmup-iters 10 --weight-decay 0 --adam-beta2 0.99
student=$run/sft/hf-3
teacher=$run/sft/hf-9

"$python" train.py --config recipes/laptop/opd.yaml \
    --hf-checkpoint "$student" --opd-teacher-load "$teacher" --opd-kl "${OPD_KL:-full}" \
    --prompt-data "$run/prompts.jsonl" \
    --run-dir "$run/opd" --save "$run/opd/checkpoints" --save-hf "$run/opd/hf-{rollout_id}"

# The teacher, the student before and after.
"$python" examples/digits.py score "$teacher" "$student" "$run/opd/hf-24"
