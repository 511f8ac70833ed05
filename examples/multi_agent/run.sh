#!/usr/bin/env bash
# A solver and a critic, played by one model, are trained together on a laptop CPU.
set -euo pipefail
cd "$(dirname "$0")/../.."
export PYTHONPATH=.
python=${PYTHON:-python}
run=${RUN_DIR:-runs/examples/multi_agent}
steps=${STEPS:-24}

"$python" examples/digits.py model "$run/model"
"$python" examples/digits.py prompts "$run/prompts.jsonl"
"$python" examples/multi_agent/agents.py warm_up "$run/warm_up.jsonl"

"$python" train.py \
    --hf-checkpoint "$run/model" --run-dir "$run/sft" --save "$run/sft/checkpoints" --save-interval 24 --save-hf "$run/sft/hf-{rollout_id}" \
    --rollout-function-path slime.rollout.sft_rollout.generate_rollout --debug-train-only \
    --loss-type sft_loss --calculate-per-token-loss --disable-compute-advantages-and-returns \
    --prompt-data "$run/warm_up.jsonl" --input-key messages --loss-mask-type qwen \
    --num-rollout 24 --rollout-batch-size 1280 --global-batch-size 64 \
    --use-dynamic-batch-size --max-tokens-per-gpu 8192 \
    --lr 4e-3 --min-lr 2e-4 --lr-decay-style cosine --lr-warmup-iters 20 --weight-decay 0 --adam-beta2 0.99

agents=examples/multi_agent/agents.py
"$python" train.py \
    --hf-checkpoint "$run/sft/hf-23" --run-dir "$run/rl" --save "$run/rl/checkpoints" --save-interval "$steps" --save-hf "$run/rl/hf-{rollout_id}" \
    --prompt-data "$run/prompts.jsonl" --input-key prompt --label-key label --rollout-shuffle \
    --custom-generate-function-path "$agents:generate" --custom-rm-path "$agents:reward" \
    --custom-reward-post-process-path "$agents:normalise" --advantage-estimator grpo \
    --num-rollout "$steps" --rollout-batch-size 24 --n-samples-per-prompt 8 --rollout-max-response-len 8 \
    --use-dynamic-batch-size --max-tokens-per-gpu 8192 --lr 3e-4 --lr-decay-style constant --weight-decay 0 --adam-beta2 0.99

"$python" examples/multi_agent/agents.py score "$run/sft/hf-23" "$run/rl/hf-$((steps - 1))"
