#!/usr/bin/env bash
# On-policy distillation: a student that sorts one time in four learns from a teacher that always does. No reward is used.
# About two minutes on a laptop CPU, half of it to make student and teacher.
set -euo pipefail
cd "$(dirname "$0")/../.."
export PYTHONPATH=.
python=${PYTHON:-python}
run=${RUN_DIR:-runs/examples/opd}

"$python" examples/digits.py model "$run/model"
"$python" examples/digits.py talks "$run/talks.jsonl"
"$python" examples/digits.py habits "$run/habits.jsonl"
"$python" examples/digits.py prompts "$run/prompts.jsonl"

supervised() {  # name, data, rollouts
    "$python" train.py \
        --hf-checkpoint "$run/model" --run-dir "$run/$1" --save "$run/$1/checkpoints" --save-interval "$3" --save-hf "$run/$1/hf-{rollout_id}" \
        --rollout-function-path slime.rollout.sft_rollout.generate_rollout --debug-train-only \
        --loss-type sft_loss --calculate-per-token-loss --disable-compute-advantages-and-returns \
        --prompt-data "$2" --input-key messages --loss-mask-type qwen \
        --num-rollout "$3" --rollout-batch-size 1280 --global-batch-size 64 \
        --use-dynamic-batch-size --max-tokens-per-gpu 8192 \
        --lr 4e-3 --min-lr 2e-4 --lr-decay-style cosine --lr-warmup-iters 10 --weight-decay 0 --adam-beta2 0.99
}
supervised teacher "$run/talks.jsonl" 10 &
teacher=$!
supervised student "$run/habits.jsonl" 12
wait "$teacher"
"$python" examples/digits.py score "$run/teacher/hf-9"
"$python" examples/digits.py score "$run/student/hf-11"

"$python" train.py \
    --hf-checkpoint "$run/student/hf-11" --run-dir "$run/opd" --save "$run/opd/checkpoints" --save-interval 30 --save-hf "$run/opd/hf-{rollout_id}" \
    --use-opd --opd-type trainer --opd-teacher-load "$run/teacher/hf-9" --opd-kl "${OPD_KL:-full}" \
    --custom-rm-path slime.rollout.on_policy_distillation.zero_reward \
    --prompt-data "$run/prompts.jsonl" --input-key prompt --label-key label --rollout-shuffle \
    --num-rollout 30 --rollout-batch-size 64 --n-samples-per-prompt 4 --rollout-max-response-len 8 \
    --use-dynamic-batch-size --max-tokens-per-gpu 8192 --lr 1e-3 --weight-decay 0 --adam-beta2 0.99

"$python" examples/digits.py score "$run/opd/hf-29"
