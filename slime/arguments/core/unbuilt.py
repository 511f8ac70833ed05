"""Flags of slime scripts that this version does not build: refused by name, or told of where that is safe."""

UNBUILT_FLAGS = frozenset(
    """
    allgather-cp freeze-indexer load-forge-rollout-data use-stateless-adam
    """.split()  # noqa: SIM905 - a paragraph is easier to scan than many quoted lines
)

# Why a flag does nothing here and changes nothing of what is trained -> such flags, of slime and of Megatron.
IDLE_FLAGS = {
    "how it is computed is slime's to choose": """
        moe-grouped-gemm moe-permute-fusion moe-router-fusion rope-fusion bias-swiglu-fusion
        bias-dropout-fusion bias-gelu-fusion persist-layer-norm use-flash-attn use-mcore-models
        transformer-impl qwen-gdn-backend use-cpu-initialization
        perform-initialization data-pad-size-multiplier
        create-attention-mask-in-dataloader manual-gc manual-gc-interval empty-unused-memory-level
        use-torch-optimizer-for-cpu-offload""",
    "the config of --hf-checkpoint says it": """
        spec model-name padded-vocab-size make-vocab-size-divisible-by position-embedding seq-length
        rope-type tokenizer-type tokenizer-model use-rope-scaling rope-scaling-factor""",
    "--dtype decides it": "bf16",
    "slime has formats of its own for checkpoints and logs": """
        ckpt-format use-dist-ckpt auto-detect-ckpt-format dist-ckpt-strictness ckpt-fully-parallel-save
        ckpt-assume-constant-structure log-interval log-throughput timing-log-level tensorboard-dir
        tensorboard-log-interval save-rng""",
    "slime moves data and requests in its own way": """
        rollout-data-transport use-distributed-post http-proxy actor-num-cpus min-batch-collection-ratio""",
    "slime starts a router of its own, whose address plug-ins get": "sglang-router-ip",
    "the trainer's processes stay; --offload-train gives their device memory back": "release-train",
    "--use-pytorch-profiler records steps": "profile",
}
_WHY_IDLE = {name: why for why, names in IDLE_FLAGS.items() for name in names.split()}
# Flags of plug-ins that slime has on its own command line: attributes of args, for whoever reads them.
PLUGIN_FLAGS = ("rollout-buffer-url", "fetch-trajectory-retry-times", "rollout-task-type")

# What flags of TRL, verl and transformers are called here: ours -> theirs.
_SYNONYMS = {
    "lr": "learning-rate",
    "n-samples-per-prompt": "num-generations rollout-n",
    "rollout-max-response-len": "max-completion-length max-response-length max-new-tokens max-tokens",
    "rollout-max-prompt-len": "max-prompt-length",
    "kl-loss-coef": "beta",
    "rollout-temperature": "temperature",
    "rollout-top-p": "top-p",
    "rollout-top-k": "top-k",
    "hf-checkpoint": "model model-path model-name-or-path",
    "prompt-data": "train-files dataset dataset-name",
    "eval-prompt-data": "val-files",
    "rollout-batch-size": "train-batch-size",
    "global-batch-size": "ppo-mini-batch-size",
    "micro-batch-size": "per-device-train-batch-size",
    "max-tokens-per-gpu": "ppo-max-token-len-per-gpu",
    "use-dynamic-batch-size": "use-dynamic-bsz",
    "clip-grad": "max-grad-norm grad-clip",
    "eps-clip": "epsilon clip-ratio clip-ratio-low",
    "eps-clip-high": "epsilon-high clip-ratio-high",
    "eps-clip-c": "clip-ratio-c",
    "advantage-estimator": "adv-estimator",
    "kl-coef": "kl-ctrl-kl-coef",
    "entropy-coef": "entropy-coeff",
    "loss-reduction": "loss-agg-mode",
    "disable-grpo-std-normalization": "scale-rewards",
    "num-epoch": "num-train-epochs total-epochs",
    "num-rollout": "max-steps total-training-steps",
    "lr-warmup-iters": "warmup-steps",
    "lr-warmup-fraction": "warmup-ratio",
    "lr-decay-style": "lr-scheduler-type",
    "adam-eps": "adam-epsilon",
    "save": "output-dir default-local-dir",
    "save-interval": "save-steps save-freq",
    "eval-interval": "eval-steps test-freq",
    "load": "resume-from-checkpoint",
    "custom-rm-path": "reward-funcs custom-reward-function-path",
    "use-wandb": "report-to",
    "activation-checkpointing": "gradient-checkpointing enable-gradient-checkpointing",
    "num-steps-per-rollout": "num-iterations steps-per-generation ppo-epochs",
    "sglang-mem-fraction-static": "gpu-memory-utilization vllm-gpu-memory-utilization",
    "actor-num-gpus-per-node": "n-gpus-per-node",
    "actor-num-nodes": "nnodes",
    "ref-load": "ref-model",
    "lora-rank": "lora-r",
    "wandb-project": "project-name",
    "wandb-group": "experiment-name",
}
SYNONYMS = {theirs: ours for ours, names in _SYNONYMS.items() for theirs in names.split()}


def is_unbuilt(name: str) -> bool:
    """Whether `use-stateless-adam` (no dashes in front) is a flag of slime that this version refuses."""
    return name in UNBUILT_FLAGS


def why_idle(option: str) -> str | None:
    """Why `--moe-grouped-gemm`, or `--no-rope-fusion`, does nothing here; None: it is no such flag."""
    name = option.removeprefix("--").replace("_", "-")
    return _WHY_IDLE.get(name) or _WHY_IDLE.get(name.removeprefix("no-"))
