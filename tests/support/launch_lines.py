"""Command lines in the way of slime's launch scripts: model flags x recipes, and the models they name."""

import json
from pathlib import Path

# Sizes are those of the tiny models in megatron_families.py.
DENSE = (
    "--swiglu --num-layers 4 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4 "
    "--use-rotary-position-embeddings --disable-bias-linear --normalization RMSNorm --norm-epsilon 1e-5 "
    "--rotary-base 10000 --vocab-size 127 --untie-embeddings-and-output-weights "
    "--position-embedding-type rope "
)
GROUPED = DENSE + "--group-query-attention --num-query-groups 2 "
EXPERTS = (
    "--moe-ffn-hidden-size 24 --moe-token-dispatcher-type alltoall --moe-grouped-gemm --moe-permute-fusion "
    "--moe-token-drop-policy probs --moe-router-dtype fp32 --moe-aux-loss-coeff 0 "
)
SIGMOID = EXPERTS + (
    "--moe-router-score-function sigmoid --moe-router-pre-softmax --moe-router-enable-expert-bias "
    "--moe-router-bias-update-rate 0 --moe-router-topk-scaling-factor 1.7 --moe-layer-freq [0]*1+[1]*3 "
    "--moe-shared-expert-intermediate-size 24 --moe-router-load-balancing-type seq_aux_loss "
)
LINEAR = (
    "--use-gated-attention --apply-layernorm-1p --rotary-percent 0.25 --spec slime_plugins.models.x get_spec "
)

# Model type -> what its file under scripts/models says.
MODELS = {
    "llama": GROUPED + "--use-rope-scaling --rope-scaling-factor 8.0",
    "qwen2": GROUPED + "--add-qkv-bias",
    "qwen3": GROUPED + "--qk-layernorm --kv-channels 16",
    "qwen3_moe": GROUPED
    + EXPERTS
    + "--qk-layernorm --kv-channels 16 --moe-router-score-function softmax --moe-router-topk 2 "
    "--num-experts 8 --moe-layer-freq [1]*1+[0]*1+[1]*2",
    "glm4": GROUPED + "--post-self-attn-layernorm --post-mlp-layernorm --add-qkv-bias --rotary-percent 0.5 "
    "--rotary-interleaved --no-rope-fusion --kv-channels 16",
    "glm4_moe": GROUPED + SIGMOID + "--num-experts 8 --moe-router-topk 2 --moe-router-num-groups 2 "
    "--moe-router-group-topk 1 --rotary-percent 0.5 --add-qkv-bias --qk-layernorm --kv-channels 16",
    "deepseek_v3": DENSE + SIGMOID + "--num-experts 16 --moe-router-topk 4 --moe-router-num-groups 4 "
    "--moe-router-group-topk 2 --multi-latent-attention --q-lora-rank 12 --kv-lora-rank 16 --qk-head-dim 12 "
    "--qk-pos-emb-head-dim 8 --v-head-dim 16 --kv-channels 128 --qk-layernorm --rotary-scaling-factor 16 "
    "--mscale 1.0 --mscale-all-dim 0.7 --no-rope-fusion --make-vocab-size-divisible-by 1280 "
    "--no-position-embedding --attention-softmax-in-fp32",
    "mimo": GROUPED + "--add-qkv-bias --mtp-num-layers 1",
    "qwen3_next": GROUPED + LINEAR,
    "qwen3_5": GROUPED + LINEAR + "--attention-output-gate --linear-attention-freq 4 --linear-key-head-dim 8",
    "minimax_m2": GROUPED.replace("--ffn-hidden-size 48", "--ffn-hidden-size 24")
    + EXPERTS
    + "--num-experts 8 --moe-router-topk 2 --moe-router-score-function sigmoid --qk-layernorm "
    "--moe-router-enable-expert-bias --kv-channels 16 --rotary-percent 0.5 --moe-layer-freq [1]*4 "
    "--spec slime_plugins.models.minimax_m2 get_minimax_m2_spec",
    "gpt_oss": GROUPED + "--spec slime_plugins.models.gpt_oss get_gpt_oss_spec",
}
NOT_BUILT = ("gpt_oss",)  # by Megatron: FSDP trains them

START = "--hf-checkpoint {root}/{model} --ref-load {root}/{model}_torch_dist "
RESUMES = START + "--load {root}/{model}_slime/ --save {root}/{model}_slime/ --save-interval 20 "
DATA = (
    "--prompt-data {root}/dapo.jsonl --input-key prompt --label-key label --apply-chat-template "
    "--rollout-shuffle --rm-type deepscaler --num-rollout 3000 --rollout-batch-size 32 --balance-data "
    "--n-samples-per-prompt 8 --rollout-max-response-len 8192 --rollout-temperature 1 "
    "--global-batch-size 256 "
)
EVAL = (
    "--eval-interval 20 --eval-prompt-data aime {root}/aime.jsonl --n-samples-per-eval-prompt 16 "
    "--eval-max-response-len 16384 --eval-top-p 1 "
)
PERF = (
    "--tensor-model-parallel-size 1 --sequence-parallel --pipeline-model-parallel-size 1 "
    "--context-parallel-size 1 --expert-model-parallel-size 1 --expert-tensor-parallel-size 1 "
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
    "--use-dynamic-batch-size --max-tokens-per-gpu 9216 "
)
GRPO = (
    "--advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.00 --kl-loss-type low_var_kl "
    "--entropy-coef 0.00 --eps-clip 0.2 --eps-clip-high 0.28 "
)
NO_KL = (
    "--advantage-estimator gspo --kl-loss-coef 0.00 --kl-loss-type low_var_kl --kl-coef 0.00 --eps-clip 4e-4 "
)
ADAM = (
    "--optimizer adam --lr 1e-6 --lr-decay-style constant --weight-decay 0.1 --adam-beta1 0.9 "
    "--adam-beta2 0.98 "
)
OFFLOAD = "--optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d --use-precision-aware-optimizer "
SGLANG = "--rollout-num-gpus-per-engine 2 --sglang-mem-fraction-static 0.7 --sglang-cuda-graph-max-bs 64 "
MISC = (
    "--attention-dropout 0.0 --hidden-dropout 0.0 --accumulate-allreduce-grads-in-fp32 "
    "--attention-softmax-in-fp32 --attention-backend flash "
)
ONE_NODE = "--actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate "
REPLAY = (
    START + DATA + PERF + GRPO + ADAM + MISC + ONE_NODE + "--ci-test --load-debug-rollout-data {root}/a.pt "
)
NORM = "{root}/norm_{{role}}_{{rollout_id}}_{{step_id}}.pt "

RECIPES = {
    "colocated": RESUMES + DATA + EVAL + PERF + GRPO + ADAM + SGLANG + MISC + ONE_NODE,
    "offloaded": START + DATA + EVAL + PERF + NO_KL + ADAM + OFFLOAD + SGLANG + MISC + ONE_NODE
    + "--use-tis ",
    "separate": START + DATA + PERF + GRPO + ADAM + SGLANG + MISC
    + "--actor-num-gpus-per-node 4 --rollout-num-gpus 4 --sglang-cuda-graph-bs 1 2 4 8 16 ",
    "many nodes": RESUMES + DATA + PERF + GRPO + ADAM + OFFLOAD + SGLANG + MISC
    + "--actor-num-nodes 4 --actor-num-gpus-per-node 8 --colocate --sglang-enable-dp-attention "
    "--sglang-dp-size 2 --sglang-enable-deepep-moe --sglang-deepep-mode auto --moe-enable-deepep "
    "--moe-token-dispatcher-type flex ",
    "tested": START + DATA + PERF + NO_KL + ADAM + SGLANG + MISC + ONE_NODE
    + "--ci-test --ci-disable-kl-checker --sglang-disable-piecewise-cuda-graph --use-fault-tolerance ",
    "replayed": REPLAY + "--ci-load-grad-norm " + NORM,
    "saves norms": REPLAY + "--debug-train-only --ci-save-grad-norm " + NORM,
    "sft": RESUMES + PERF + MISC
    + "--rollout-function-path slime.rollout.sft_rollout.generate_rollout --prompt-data {root}/dapo.jsonl "
    "--input-key messages --rollout-shuffle --num-epoch 3 --rollout-batch-size 128 --global-batch-size 128 "
    "--loss-type sft_loss --calculate-per-token-loss --disable-compute-advantages-and-returns "
    "--debug-train-only --optimizer adam --lr 1e-5 --lr-decay-style cosine --min-lr 1e-6 "
    "--lr-warmup-fraction 0.1 --actor-num-nodes 1 --actor-num-gpus-per-node 8 ",
    "ppo": RESUMES + DATA + PERF + ADAM + SGLANG + MISC + ONE_NODE
    + "--advantage-estimator ppo --use-kl-loss --kl-loss-coef 0.001 --kl-loss-type low_var_kl "
    "--num-critic-only-steps 1 --normalize-advantages --critic-lr 1e-5 --value-clip 0.2 ",
    "debugged": START + DATA + PERF + GRPO + ADAM + SGLANG + MISC + ONE_NODE
    + "--dump-details {root}/details --log-multi-turn --log-passrate --log-correct-samples "
    "--wandb-always-use-train-step --sglang-router-policy cache_aware --recompute-loss-function "
    '--train-env-vars {{"NCCL_DEBUG":"INFO"}} --log-probs-max-tokens-per-gpu 4096 --bf16 '
    "--rollout-data-transport object-store --data-pad-size-multiplier 128 --model-name {model} "
    "--no-check-for-nan-in-loss-and-grad --wandb-project slime-dev --wandb-group {model} ",
}  # fmt: skip


# Engines that are larger than a machine: sizes and flags of the engines, and the machines of eight GPUs.
LARGE = {
    name: (
        f"--actor-num-nodes {trains} --actor-num-gpus-per-node 8 --rollout-num-gpus-per-engine {each} "
        f"--sglang-enable-dp-attention --sglang-enable-dp-lm-head --sglang-ep-size {each} {more} ",
        hosts,
    )
    for name, trains, hosts, each, more in (
        ("355B on 8 machines", 8, 8, 32, "--colocate --sglang-dp-size 4 --sglang-moe-dense-tp-size 1"),
        ("671B on 16 machines", 16, 16, 64, "--colocate --sglang-dp-size 64"),
        ("1T on 32 machines", 32, 32, 16, "--colocate --sglang-dp-size 8"),
        ("744B, half of it trains", 16, 32, 64, "--rollout-num-gpus 128 --sglang-dp-size 8"),
    )
}
RECIPES |= {
    name: START + DATA + PERF + GRPO + ADAM + OFFLOAD + MISC + words for name, (words, _) in LARGE.items()
}

# Flags of SGLang 0.5.23 that the lines above mean: (name, number of words, type).
SERVER_FLAGS = [
    ("mem-fraction-static", None, "float"),
    ("cuda-graph-max-bs-decode", None, "int"),
    ("cuda-graph-bs-decode", "+", "int"),
    ("disable-prefill-cuda-graph", 0, None),
    ("moe-a2a-backend", None, "str"),
    ("deepep-mode", None, "str"),
    ("enable-dp-attention", 0, None),
    ("pp-size", None, "int"),
    ("dp-size", None, "int"),
    ("attn-dp-size", None, "int"),
    ("ep-size", None, "int"),
    ("enable-dp-lm-head", 0, None),
    ("moe-dense-tp-size", None, "int"),
    ("speculative-algorithm", None, "str"),
    ("speculative-num-steps", None, "int"),
    ("speculative-eagle-topk", None, "int"),
    ("speculative-num-draft-tokens", None, "int"),
    ("enable-draft-weights-cpu-backup", 0, None),
    ("kv-cache-dtype", None, "str"),
]


def make_server(folder: Path) -> Path:
    """An interpreter stand-in that says the flags of an SGLang server."""
    rows = [
        {"options": [f"--{n}"], "dest": n.replace("-", "_"), "nargs": nargs, "type": kind}
        | {"choices": None, "help": ""}
        for n, nargs, kind in SERVER_FLAGS
    ]
    (folder / "table").write_text("SGLANG-FLAGS " + json.dumps({"version": "launch", "flags": rows}) + "\n")
    script = folder / "python"
    script.write_text(f'#!/bin/sh\ncase "$*" in *metadata*) echo launch;; *) cat {folder}/table;; esac\n')
    script.chmod(0o755)
    return script


def make_world(root: Path) -> None:
    """Folders and files as the command lines name them, with no weights in them."""
    make_server(root)
    for model in MODELS:
        for folder in (model, f"{model}_torch_dist"):
            (root / folder).mkdir()
        (root / model / "config.json").write_text(json.dumps({"model_type": model, "vocab_size": 127}))
        (root / f"{model}_torch_dist" / "latest_checkpointed_iteration.txt").write_text("release")
    for file in ("dapo.jsonl", "aime.jsonl"):
        (root / file).write_text(json.dumps({"prompt": "1 + 1?", "label": "2"}) + "\n")


def command_line(model: str, recipe: str, root: Path) -> list[str]:
    """The words after `python3 train.py`."""
    words = f"{MODELS[model]} {RECIPES[recipe]} --sglang-python {{root}}/python"
    return words.format(root=root, model=model).split()
