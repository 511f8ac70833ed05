"""Launch scripts in the ways people write them: bash with arrays, files and jobs, and Python launchers.

ROOT is the folder that `make_files` fills. A script starts, or is refused for the one reason beside it.
"""

import json
from pathlib import Path

from launch_lines import MODELS, make_server

# What most scripts share; each is an array of bash.
ARRAYS = """
CKPT_ARGS=( --hf-checkpoint ROOT/$NAME --ref-load ROOT/${NAME}_torch_dist
            --load ROOT/${NAME}_run/ --save ROOT/${NAME}_run/ --save-interval 20 )
ROLLOUT_ARGS=( --prompt-data ROOT/math.jsonl --input-key prompt --label-key label --apply-chat-template
               --rollout-shuffle --rm-type deepscaler --num-rollout 30 --rollout-batch-size 8
               --n-samples-per-prompt 8 --rollout-max-response-len 64 --rollout-temperature 1
               --global-batch-size 64 --balance-data )
EVAL_ARGS=( --eval-interval 20 --eval-prompt-data aime ROOT/math.jsonl --n-samples-per-eval-prompt 4
            --eval-max-response-len 64 --eval-top-p 0.95 )
PERF_ARGS=( --tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 1
            --context-parallel-size 1 --expert-model-parallel-size 1 --expert-tensor-parallel-size 1
            --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
            --use-dynamic-batch-size --max-tokens-per-gpu 4096 )
GRPO_ARGS=( --advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.00 --kl-loss-type low_var_kl
            --entropy-coef 0.00 --eps-clip 0.2 --eps-clip-high 0.28 )
OPTIMIZER_ARGS=( --optimizer adam --lr 1e-6 --lr-decay-style constant --weight-decay 0.1
                 --adam-beta1 0.9 --adam-beta2 0.98 )
SGLANG_ARGS=( --rollout-num-gpus-per-engine 2 --sglang-mem-fraction-static 0.7 --sglang-python ROOT/python )
MISC_ARGS=( --attention-dropout 0.0 --hidden-dropout 0.0 --accumulate-allreduce-grads-in-fp32
            --attention-softmax-in-fp32 --attention-backend flash )
COMMON=( "${CKPT_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${OPTIMIZER_ARGS[@]}" "${GRPO_ARGS[@]}" "${PERF_ARGS[@]}"
         "${EVAL_ARGS[@]}" "${SGLANG_ARGS[@]}" "${MISC_ARGS[@]}" )
"""
HEAD = """#!/bin/bash
pkill -9 sglang
sleep 3
ray stop --force
set -ex
export PYTHONBUFFERED=16
"""
SOURCED = HEAD + 'NAME=%s\nSCRIPT_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"\n'
SOURCED += 'source "${SCRIPT_DIR}/models/$NAME.sh"\nsource ROOT/arrays.sh\n'
JOB = """
RUNTIME_ENV_JSON="{
  \\"env_vars\\": {\\"PYTHONPATH\\": \\"/root/Megatron-LM/\\", \\"CUDA_DEVICE_MAX_CONNECTIONS\\": \\"1\\"}
}"
ray start --head --node-ip-address ${MASTER_ADDR:-127.0.0.1} --num-gpus 8 --disable-usage-stats
ray job submit --address="http://127.0.0.1:8265" --runtime-env-json="${RUNTIME_ENV_JSON}" \\
   -- python3 train.py --actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate \\
   ${MODEL_ARGS[@]} ${COMMON[@]} """
APART = """
ray job submit --address="http://127.0.0.1:8265" -- python3 train_async.py \\
   --actor-num-nodes 1 --actor-num-gpus-per-node 4 --rollout-num-gpus 4 ${MODEL_ARGS[@]} ${COMMON[@]} """
PYTHON = """
import slime.utils.external_utils.command_utils as U

def execute():
    ckpt = "--hf-checkpoint ROOT/{model} --ref-load ROOT/{model}_torch_dist "
    rollout = (
        "--prompt-data ROOT/math.jsonl --input-key prompt --label-key label --apply-chat-template "
        "--rollout-shuffle --rm-type math --num-rollout 3 --rollout-batch-size 8 "
        "--n-samples-per-prompt 4 --rollout-max-response-len 32 --rollout-temperature 0.8 "
        "--global-batch-size 32 "
    )
    more = {more!r}
    U.execute_train(train_args=f"{{ckpt}} {{rollout}} {{U.get_default_wandb_args(__file__)}} {{more}} ",
                    num_gpus_per_node=8, megatron_model_type="{model}"{keywords})

if __name__ == "__main__":
    execute()
"""


def job(model: str, flags: str, before: str = "", start: str = JOB) -> str:
    """A script that sources the flags of its model, then submits a job."""
    return SOURCED % model + before + start + flags + "\n"


def launcher(model: str, more: str, keywords: str = "") -> str:
    arguments = more + " --sglang-mem-fraction-static 0.7 --sglang-python ROOT/python"
    return PYTHON.format(model=model, more=arguments, keywords=keywords)


DAPO = "--reward-key score --rm-type dapo --over-sampling-batch-size 16 --dynamic-sampling-filter-path "
DAPO += "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std "
EAGLE = "--sglang-speculative-algorithm EAGLE --sglang-speculative-num-steps 2 "
EAGLE += "--sglang-speculative-eagle-topk 1 --sglang-speculative-num-draft-tokens 3 "
MTP = "--mtp-num-layers 1 --enable-mtp-training --mtp-loss-scaling-factor 0.2 "
SFT = (
    "--rollout-function-path slime.rollout.sft_rollout.generate_rollout --prompt-data ROOT/chats.parquet "
    "--input-key messages --rollout-shuffle --num-epoch 3 --rollout-batch-size 8 --global-batch-size 8 "
    "--loss-type sft_loss --calculate-per-token-loss --disable-compute-advantages-and-returns "
    "--debug-train-only --loss-mask-type qwen3"
)
TEACHER = (
    "--custom-rm-path slime.rollout.on_policy_distillation.reward_func --custom-reward-post-process-path "
    "slime.rollout.on_policy_distillation.post_process_rewards --rm-url http://127.0.0.1:13141/generate "
)

# Name -> the script. All of these start.
SCRIPTS = {
    "arrays, a sourced model, a ray job": job("qwen3", ""),
    "an array for W&B, switched off in comments": job(
        "qwen3",
        "${WANDB_ARGS[@]}",
        "WANDB_ARGS=(\n   # --use-wandb\n   # --wandb-project slime-dev\n   # --wandb-key ${WANDB_KEY}\n)\n",
    ),
    "settings of W&B without it": job(
        "qwen3",
        "--wandb-project slime --wandb-group $NAME --wandb-key ${WANDB_KEY:-none} --wandb-team us "
        "--wandb-mode offline --wandb-dir ROOT --wandb-host http://h --wandb-run-id r "
        "--disable-wandb-random-suffix --wandb-always-use-train-step",
    ),
    "TensorBoard": job("qwen3", "--use-tensorboard --tb-project-name p --tb-experiment-name e"),
    "words of the script": job("qwen3", '"$@" --seed ${SEED:=3} --rollout-seed ${SEED}'),
    "a heredoc of flags": job(
        "llama", "$MORE", "read -r -d '' MORE <<'EOF' || true\n--clip-grad 0.5\n--log-passrate\nEOF\n"
    ),
    "a condition on the number of GPUs": job(
        "qwen2",
        "${EXTRA[@]}",
        'EXTRA=()\nif [ "${NUM_GPUS:-8}" -ge 8 ]; then EXTRA+=(--use-fault-tolerance '
        "--rollout-health-check-interval 10 --rollout-health-check-timeout 5 "
        "--rollout-health-check-first-wait 300); fi\n",
    ),
    "NVLink is looked for": job(
        "qwen3",
        "--distributed-timeout-minutes 30",
        "NVLINK_COUNT=$(nvidia-smi topo -m 2>/dev/null | grep -o 'NV[0-9][0-9]*' | wc -l)\n"
        'if [ "$NVLINK_COUNT" -gt 0 ]; then HAS_NVLINK=1; else HAS_NVLINK=0; fi\n',
    ),
    "asynchronous, engines apart": job("qwen3", "--update-weights-interval 2", start=APART),
    "fully asynchronous": job(
        "qwen3",
        "--rollout-function-path fully_async_rollout.generate_rollout_fully_async --keep-old-actor "
        "--update-weight-buffer-size $(( 512 * 1024 * 1024 )) --update-weight-transport nccl --use-tis",
        start=APART,
    ),
    "mixture of experts with MTP and speculative decoding": job(
        "glm4_moe", MTP + EAGLE + "--expert-model-parallel-size 2 --sglang-enable-draft-weights-cpu-backup"
    ),
    "experts: DeepEP, attention over data-parallel ranks, optimizer in host memory": job(
        "qwen3_moe",
        "--expert-model-parallel-size 4 --moe-enable-deepep --moe-token-dispatcher-type flex "
        "--optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d --use-precision-aware-optimizer "
        "--sglang-enable-dp-attention --sglang-dp-size 2 --sglang-ep-size 2 --sglang-enable-dp-lm-head "
        "--sglang-moe-dense-tp-size 1 --sglang-deepep-mode auto --sglang-moe-a2a-backend deepep "
        "--sglang-cuda-graph-bs 1 2 4 8 $(seq 16 8 64) --rollout-num-gpus-per-engine 4",
    ),
    "experts replayed": job("qwen3_moe", "--use-rollout-routing-replay --use-routing-replay --use-tis"),
    "latent attention on many nodes": SOURCED
    % "deepseek_v3"
    + "for WORKER_IP in $(awk '{print $1}' /root/mpi_rack_hostfile 2>/dev/null); do\n"
    '  ssh root@"${WORKER_IP}" "pkill -9 sglang; ray start --address=${MASTER_ADDR}:6379" &\ndone\nwait\n'
    "python3 train.py --actor-num-nodes 2 --actor-num-gpus-per-node 8 --colocate ${MODEL_ARGS[@]} "
    "${COMMON[@]} --num-gpus-per-node 8 --pipeline-model-parallel-size 2 "
    "--decoder-last-pipeline-num-layers 2 --decoder-first-pipeline-num-layers 2 "
    "--expert-model-parallel-size 8 --allgather-cp --train-env-vars "
    '\'{"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}\' --update-weight-buffer-size 1073741824 '
    "--no-check-for-nan-in-loss-and-grad --rollout-num-gpus-per-engine 8 --moe-router-dtype fp32\n",
    "FP8 engines beside 16-bit weights, FP8 arithmetic": job(
        "qwen3",
        "--hf-checkpoint ROOT/qwen3_fp8 --ref-load ROOT/qwen3 --transformer-impl transformer_engine --bf16 "
        "--fp8-format e4m3 --fp8-recipe blockwise --sglang-kv-cache-dtype fp8_e4m3",
    ),
    "PPO with a critic in a file of roles": job(
        "qwen3",
        "--advantage-estimator ppo --megatron-config-path ROOT/roles.yaml --num-critic-only-steps 1 "
        "--normalize-advantages --gamma 1.0 --lambd 0.95 --value-clip 0.2 --kl-coef 0.0",
    ),
    "PPO with flags of the critic": job(
        "qwen3",
        "--advantage-estimator ppo --critic-lr 1e-5 --critic-lr-warmup-iters 2 --critic-load ROOT/qwen3 "
        "--num-critic-only-steps 2 --lambd 0.95",
    ),
    "REINFORCE++": job(
        "qwen3", "--advantage-estimator reinforce_plus_plus --normalize-advantages --kl-coef 0.0"
    ),
    "settings of a critic that nobody trains": job("qwen3", "--lambd 0.95 --num-critic-only-steps 1"),
    "GSPO without a KL": job(
        "qwen3", "--advantage-estimator gspo --no-use-kl-loss --eps-clip 4e-4 --eps-clip-high 4e-4"
    ),
    "CISPO": job("qwen3", "--advantage-estimator cispo --eps-clip 1.0 --eps-clip-high 4.0 --use-tis"),
    "Dr. GRPO": job(
        "qwen3",
        "--disable-grpo-std-normalization --calculate-per-token-loss --use-rollout-logprobs --eps-clip-c 3 "
        "--custom-pg-loss-reducer-function-path plug.reducer",
    ),
    "DAPO with parts of a row": job(
        "qwen3",
        DAPO + "--partial-rollout --mask-offpolicy-in-partial-rollout --reward-key score "
        "--eval-reward-key score --prompt-data ROOT/math.jsonl@[0:6] --metadata-key metadata",
    ),
    "the mismatch helper": job(
        "qwen3",
        "--custom-config-path ROOT/mis.yaml --custom-tis-function-path plug.mis --use-tis "
        "--get-mismatch-metrics --tis-clip 2.0 --tis-clip-low 0 --use-unbiased-kl",
    ),
    "distillation from a served teacher": job(
        "qwen3", TEACHER + "--use-opd --opd-type sglang --opd-kl-coef 1.0"
    ),
    "distillation from a teacher in the trainer": job(
        "qwen3", "--use-opd --opd-type megatron --opd-kl-coef 1.0 --opd-teacher-load ROOT/qwen3"
    ),
    "an agent with tools": job(
        "qwen3",
        "--custom-generate-function-path plug.generate --custom-rm-path plug.reward --tool-key tools "
        "--metadata-key metadata --rollout-max-context-len 128 --rollout-max-prompt-len 100 "
        "--rollout-stop '</tool>' --rollout-stop-token-ids 2 --rollout-skip-special-tokens "
        "--apply-chat-template-kwargs '{\"enable_thinking\":false}' --log-multi-turn --log-correct-samples",
    ),
    "hooks everywhere": job(
        "qwen3",
        "--rollout-sample-hook-path plug.hook --rollout-sample-hook-path plug.hook "
        "--custom-rollout-log-function-path plug.log --custom-eval-rollout-log-function-path plug.log_eval "
        "--buffer-filter-path plug.pop --rollout-sample-filter-path plug.sample_filter "
        "--rollout-all-samples-process-path plug.process --rollout-data-postprocess-path plug.postprocess "
        "--custom-reward-post-process-path plug.post "
        "--custom-convert-samples-to-train-data-path plug.convert "
        "--custom-megatron-init-path plug.init --custom-megatron-before-log-prob-hook-path plug.before "
        "--custom-megatron-before-train-step-hook-path plug.before --custom-advantage-function-path plug.adv",
    ),
    "evaluation by a file": job(
        "qwen3",
        "--eval-config ROOT/eval.yaml --eval-interval 5 --skip-eval-before-train --eval-function-path "
        "slime.rollout.sglang_rollout.generate_rollout --eval-max-context-len 128",
    ),
    "evaluation by flags": job(
        "qwen3",
        "--eval-prompt-data a ROOT/math.jsonl b ROOT/math.jsonl@[0:3] --eval-input-key prompt "
        "--eval-label-key label --eval-tool-key tools --eval-temperature 0.6 --eval-top-k 20 "
        "--eval-min-new-tokens 1 --eval-max-prompt-len 100",
    ),
    "supervised fine-tuning": HEAD
    + "NAME=qwen3; source ROOT/models/qwen3.sh; source ROOT/arrays.sh\n"
    + "ray job submit -- python3 train_async.py --actor-num-nodes 1 --actor-num-gpus-per-node 8 "
    "${MODEL_ARGS[@]} ${CKPT_ARGS[@]} ${PERF_ARGS[@]} ${MISC_ARGS[@]} --optimizer adam --lr 1e-5 "
    "--lr-decay-style cosine --min-lr 1e-6 --lr-warmup-fraction 0.1 --weight-decay 0.1 " + SFT + "\n",
    "the layout of batches": job(
        "qwen3", "--qkv-format bshd --no-use-dynamic-batch-size --micro-batch-size 1"
    ),
    "rollout alone": job(
        "qwen3", "--debug-rollout-only --save-debug-rollout-data ROOT/dumps/{rollout_id}.pt --num-rollout 1"
    ),
    "a dump replayed": job(
        "qwen3",
        "--load-debug-rollout-data ROOT/dump.pt --load-debug-rollout-data-subsample 0.5 --ci-test "
        "--ci-save-grad-norm ROOT/n_{role}_{rollout_id}_{step_id}.pt",
    ),
    "everything is recorded": job(
        "qwen3",
        "--dump-details ROOT/details --record-memory-history --memory-snapshot-num-steps 2 "
        "--memory-snapshot-dir ROOT --memory-recorder torch --profile-target train_overall train_actor "
        "--use-pytorch-profiler --profile-step-start 1 --profile-step-end 2 --log-reward-category kind "
        "--check-weight-update-equal --use-rollout-entropy",
    ),
    "weights by files": job(
        "qwen3",
        "--update-weight-mode delta --update-weight-transport disk --update-weight-disk-dir ROOT/w "
        "--update-weight-delta-encoding xor --update-weight-delta-checksum xxh3-128 "
        "--update-weight-local-checkpoint-dir ROOT/l --custom-update-weight-post-write-path plug.after",
        start=APART,
    ),
    "whole weights by files, which stay": job(
        "qwen3",
        "--update-weight-transport disk --update-weight-disk-dir ROOT/w --update-weight-disk-keep-files",
        start=APART,
    ),
    "some parameters train": job(
        "qwen3",
        "--only-train-params-name-list experts mlp --log-probs-chunk-size 1024 --recompute-loss-function "
        "--log-probs-max-tokens-per-gpu 2048 --use-stateless-adam --no-save-optim --async-save "
        "--save-hf ROOT/hf_{rollout_id} --no-load-optim --no-load-rng --finetune",
    ),
    "a pipeline with virtual stages": job(
        "qwen3",
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 "
        "--overlap-grad-reduce --recompute-activations --use-distributed-optimizer --balance-by-flops "
        "--microbatch-group-size-per-virtual-pipeline-stage 2 --no-gradient-accumulation-fusion",
    ),
    "engines that run already": job(
        "qwen3", "--rollout-external-engine-addrs 127.0.0.1:3000 http://127.0.0.1:3001", start=APART
    ),
    "a trainer whose processes end while engines generate": job(
        "qwen3",
        "--release-train --update-weight-mode full --update-weight-transport disk "
        "--update-weight-disk-dir ROOT/w",
    ),
    "a router that runs already": job("qwen3", "--sglang-router-ip 127.0.0.1 --sglang-router-port 30000"),
    "another family: linear attention": job("qwen3_next", "--qwen-gdn-backend fla"),
    "another family: experts of GPT-OSS": job("gpt_oss", "--moe-router-dtype fp32"),
    "a Hugging Face folder as reference and start": job("qwen3", "--ref-load ROOT/qwen3 --load ROOT/qwen3"),
    "eval in the shell": HEAD
    + 'NAME=qwen3; . ROOT/models/qwen3.sh; . ROOT/arrays.sh\nCMD="python3 train.py --colocate '
    '--actor-num-gpus-per-node 8 ${MODEL_ARGS[*]} ${COMMON[*]}"\neval "$CMD" 2>&1 | tee ROOT/log\n',
    "a Python launcher": launcher(
        "qwen3",
        "--advantage-estimator grpo --optimizer adam --lr 1e-6 --lr-decay-style constant --colocate "
        "--actor-num-nodes 1 --actor-num-gpus-per-node 8 --ci-test --tensor-model-parallel-size 2",
    ),
    "a Python launcher of the asynchronous loop": launcher(
        "qwen3_moe",
        "--actor-num-gpus-per-node 4 --rollout-num-gpus 4 --advantage-estimator gspo --lr-decay-style "
        "constant --expert-model-parallel-size 2 --ci-test --ci-disable-kl-checker --use-rollout-logprobs "
        "--ci-train-rollout-logprob-abs-diff-threshold 0.2",
        ', train_script="train_async.py", extra_env_vars={"A": "b"}',
    ),
}

# Scripts of slime's FSDP trainer: no arguments of a model, flags of their own.
FSDP_SCRIPTS = {
    name: HEAD
    + "NAME=qwen3; source ROOT/arrays.sh\nTRAIN_BACKEND_ARGS=( --train-backend fsdp "
    + f"--update-weight-buffer-size 536870912 {flags} )\n"
    + "ray job submit --address=http://127.0.0.1:8265 -- python3 train.py ${TRAIN_BACKEND_ARGS[@]} "
    "--hf-checkpoint ROOT/qwen3 ${ROLLOUT_ARGS[@]} ${OPTIMIZER_ARGS[@]} --advantage-estimator grpo "
    "--kl-loss-coef 0.00 --kl-loss-type low_var_kl --kl-coef 0.00 --entropy-coef 0.00 --eps-clip 0.2 "
    "--use-dynamic-batch-size --max-tokens-per-gpu 4096 ${EVAL_ARGS[@]} ${SGLANG_ARGS[@]} "
    "--actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate\n"
    for name, flags in {
        "whole layers computed again": "--gradient-checkpointing --attn-implementation flash_attention_3",
        "a reference and a memory of its own": "--gradient-checkpointing --ref-load ROOT/qwen3 --use-kl-loss "
        '--train-env-vars \'{"PYTORCH_CUDA_ALLOC_CONF":"expandable_segments:True"}\' --use-fault-tolerance',
        "weights in host memory": "--fsdp-cpu-offload --fsdp-cpu-backend gloo --attn-implementation sdpa",
    }.items()
}

# Name -> (the script, the capability for which it is refused, and nothing else).
REFUSED = {
    "another optimizer": (job("qwen3", "--optimizer lion"), "--optimizer is 'lion': choose from"),
    "half precision": (job("qwen3", "--fp16"), "--fp16 cannot be given: --dtype decides it"),
    "dumps of another program": (
        job("qwen3", "--load-forge-rollout-data ROOT/a"),
        "--load-forge-rollout-data is a flag of slime's or Megatron's that this version does not build yet",
    ),
}

PLUGINS = """
async def generate(args, sample, sampling_params): return sample
async def reward(args, sample, **kwargs): return 1.0
def hook(args, sample): return sample
def log(rollout_id, args, samples, rollout_extra_metrics, rollout_time): return False
def log_eval(rollout_id, args, data, extra_metrics): return False
def pop(args, rollout_id, buffer, num_samples): return buffer[:num_samples]
def sample_filter(args, samples): pass
def process(args, samples, data_source): pass
def postprocess(args, rollout_id, rollout_data): pass
def post(args, samples): return [s.reward for s in samples], [s.reward for s in samples]
def convert(args, samples): return {}
def init(args): pass
def before(args, *rest, **more): pass
def adv(args, rollout_data): pass
def reducer(total_lengths, response_lengths, loss_masks, calculate_per_token_loss=False): return sum
def mis(args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, **kwargs):
    return pg_loss, loss_masks, {}
def after(args, path, version): pass
"""
ROLES = """
megatron:
  - {name: default, role: actor, args: {lr: 1e-6}}
  - {name: default, role: critic, args: {lr: 1e-5}}
"""
EVALUATION = """
eval:
  defaults: {n_samples_per_eval_prompt: 4, temperature: 0.7, top_p: 1.0, max_response_len: 64}
  datasets:
    - {name: aime, path: ROOT/math.jsonl, rm_type: deepscaler, eval_task_timeout: 60}
    - {name: gpqa, path: ROOT/math.jsonl, rm_type: math, metadata_overrides: {a: 1}}
"""
MIS = (
    "use_rs: true\nrs_lower_bound: null\nrs_upper_bound: null\nrs_veto_threshold: 1.0e-4\ntis_level: token\n"
)
MIS += "tis_mode: truncate\ntis_lower_bound: 0.5\ntis_upper_bound: 2.0\ntis_batch_normalize: true\n"
RENAMES = ("ray", "pkill", "sleep", "python3", "ssh", "nvidia-smi")


def make_files(root: Path) -> None:
    """What scripts name beside models: flags of models, data, plug-ins, files of settings, and commands."""
    import pyarrow
    from pyarrow import parquet

    make_server(root)
    (root / "models").mkdir()
    for name, words in MODELS.items():
        (root / "models" / f"{name}.sh").write_text(f"MODEL_ARGS=(\n   {words}\n)\n")
    chat = [{"role": "user", "content": "say 1"}, {"role": "assistant", "content": "1"}]
    rows = [
        {
            "prompt": [{"role": "user", "content": f"{i} + {i}?"}],
            "label": str(2 * i),
            "metadata": {"kind": "a"},
        }
        for i in range(12)
    ]
    (root / "math.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    parquet.write_table(pyarrow.Table.from_pylist([{"messages": chat}] * 12), root / "chats.parquet")
    files = {"arrays.sh": ARRAYS, "eval.yaml": EVALUATION, "roles.yaml": ROLES, "mis.yaml": MIS}
    for name, text in files.items():
        (root / name).write_text(text.replace("ROOT", str(root)))
    (root / "plug.py").write_text(PLUGINS)
    (root / "fully_async_rollout.py").write_text(
        "def generate_rollout_fully_async(args, rollout_id, data_buffer, evaluation=False): return []\n"
    )
    (root / "dump.pt").write_bytes(b"")
    commands = root / "bin"
    commands.mkdir()
    for name in RENAMES:
        (commands / name).write_text(COMMANDS.get(name, "#!/bin/bash\n"))
        (commands / name).chmod(0o755)


# Jobs run here, nobody is killed, and training only writes down how it was called.
COMMANDS = {
    "ray": '#!/bin/bash\nwhile [ $# -gt 0 ] && [ "$1" != -- ]; do shift; done; shift; "$@"\n',
    "python3": '#!/bin/bash\nprintf "%s\\n" "$@" > "$CALLED"\n',
}
