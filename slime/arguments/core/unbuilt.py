"""Flags of THUDM/slime that this version does not support: refused, or ignored with a note if safe."""

from collections.abc import Sequence
from typing import Any

from slime.arguments.core.flag import name_of, option_of
from slime.arguments.core.removed import REMOVED_FLAGS
from slime.catalog.deadlines import DEADLINE_FLAGS

UNBUILT_FLAGS = frozenset(
    """
    load-forge-rollout-data lr-warmup-samples lr-decay-samples lr-wsd-decay-style lr-wsd-decay-iters
    lr-wsd-decay-samples start-weight-decay end-weight-decay rampup-batch-size true-on-policy-mode
    """.split()  # noqa: SIM905 - a paragraph is easier to scan than many quoted lines
)

# Flags of forks and of changes proposed to slime: why they are missing, and the alternative.
_INSTEAD = {
    "use-mopd": "several teachers are servers here: --use-opd --opd-type engine --rm-url NAME=URL,NAME=URL "
    "--custom-rm-path slime.rollout.on_policy_distillation.reward_func; metadata['teacher'] of a prompt "
    "names its teacher",
    "save-lora": "with --save and --save-hf DIR/{rollout_id}, adapters are written to the folder `adapter` "
    "of each saved model, as peft reads them",
    "lora-target-preset": "sets of layers have no names here: name the layers with --lora-target-modules, "
    "such as q_proj k_proj v_proj o_proj; all-linear is the default",
    "use-dynamic-global-batch-size": "an optimizer step takes --global-batch-size episodes, however many "
    "samples each of them became, and no sample is left out; for one step per rollout, use "
    "--num-steps-per-rollout 1, and give all samples of an episode the same rollout_id",
    "true-on-policy-mode": "SGLang's deterministic kernels are not the trainer's, so log-probs differ by "
    "rounding (docs/engines.md); --deterministic-mode repeats a run bit by bit, and "
    "--sglang-rl-on-policy-target fsdp brings SGLang nearest to the trainer",
    "int4-params-rollout": "give a 16-bit --hf-checkpoint and --rollout-quantization int4 (or fp8)",
}
_TEACHER = (
    "the teacher of a distillation is chosen with --use-opd: --opd-type trainer --opd-teacher-load MODEL, or "
    "--opd-type engine --rm-url URL for a teacher behind a server"
)
# Flags that are meaningless without another flag, which is refused.
_COMPANIONS = {
    "--use-mopd": """
        mopd-teachers mopd-teacher-mode mopd-teacher-loads mopd-teacher-ckpt-steps mopd-distill-type
        mopd-topk-k mopd-alpha mopd-eps-low mopd-eps-high mopd-sampling-logprobs-key""",
    "--opd-type self (--custom-rm-path slime.rollout.on_policy_distillation.self_reward_func)": """
        opsd-beta opsd-jsd-clip opsd-privileged-info-key""",
}
_INSTEAD |= {
    name: f"it belongs to {flag}, which this version does not build; remove it"
    for flag, names in _COMPANIONS.items()
    for name in names.split()
}

_INSTEAD |= REMOVED_FLAGS

# Reason why flags have no effect here, not even on what is trained -> these flags of slime and Megatron.
IDLE_FLAGS = {
    "slime chooses how it is computed": """
        moe-grouped-gemm moe-permute-fusion moe-router-fusion rope-fusion bias-swiglu-fusion
        bias-dropout-fusion bias-gelu-fusion persist-layer-norm
        use-flash-attn use-mcore-models use-legacy-models
        transformer-impl qwen-gdn-backend use-cpu-initialization enable-experimental
        perform-initialization initialization data-pad-size-multiplier allgather-cp
        create-attention-mask-in-dataloader manual-gc manual-gc-interval manual-gc-eval
        empty-unused-memory-level use-torch-optimizer-for-cpu-offload mla-down-proj-fusion
        train-memory-margin-bytes
        megatron-deepgemm-forward-layers megatron-deepgemm-forward-modules
        megatron-deepgemm-moe-forward-layers megatron-deepgemm-moe-forward-modules
        moe-use-legacy-grouped-gemm te-rng-tracker data-parallel-random-init
        attn-implementation qkv-format fsdp-full-params fsdp-state-dict-cpu-offload fsdp-cpu-backend""",
    "the config of --hf-checkpoint decides it": """
        spec model-name padded-vocab-size make-vocab-size-divisible-by position-embedding seq-length
        encoder-seq-length decoder-seq-length rope-type tokenizer-type tokenizer-model use-rope-scaling
        rope-scaling-factor rotary-seq-len-interpolation-factor enable-yarn yarn-rotary-scaling-factor
        yarn-original-max-position-embeddings yarn-beta-fast yarn-beta-slow yarn-mscale
        yarn-mscale-all-dim quick-geglu squared-relu no-rope-freq linear-attention-type
        use-hf-config-for-megatron""",
    "--dtype decides it": "bf16",
    "--max-tokens-per-gpu bounds the passes without a backward pass too": "log-probs-max-tokens-per-gpu",
    "this version trains in 16 or 32 bit, or with --fp8-training in FP8 by rules of its own": """
        fp8-format fp8-recipe fp8-margin fp8-interval fp8-amax-history-len fp8-amax-compute-algo fp8-wgrad
        fp8-param-gather keep-fp8-weight-transpose-cache first-last-layers-bf16
        num-layers-at-start-in-bf16 num-layers-at-end-in-bf16 moe-router-padding-for-fp8""",
    "slime has its own formats for checkpoints and logs": """
        ckpt-format use-dist-ckpt auto-detect-ckpt-format dist-ckpt-strictness dist-ckpt-format
        ckpt-fully-parallel-save ckpt-fully-parallel-load ckpt-assume-constant-structure
        ckpt-convert-format async-strategy use-persistent-ckpt-worker save-retain-interval
        non-persistent-save-interval non-persistent-ckpt-type exit-on-missing-checkpoint
        dist-ckpt-save-pre-mcore-014 save-rng log-interval log-throughput log-progress
        timing-log-level timing-log-option log-params-norm log-num-zeros-in-grad log-straggler
        disable-straggler-on-startup log-timers-to-tensorboard log-memory-to-tensorboard
        log-loss-scale-to-tensorboard log-validation-ppl-to-tensorboard
        log-world-size-to-tensorboard log-batch-size-to-tensorboard
        log-learning-rate-to-tensorboard tensorboard-dir tensorboard-log-interval
        tensorboard-queue-size megatron-to-hf-mode""",
    "slime has a loop and data of its own": """
        train-iters train-samples skip-train exit-interval exit-duration-in-mins exit-signal-handler
        eval-iters rerun-mode num-workers dataloader-type data-path data-cache-path data-args-path
        train-data-path valid-data-path split mock-data reset-position-ids reset-attention-mask
        eod-mask-loss num-dataset-builder-threads mmap-bin-files""",
    "slime moves data and requests in its own way": """
        rollout-data-transport use-distributed-post http-proxy actor-num-cpus min-batch-collection-ratio
        use-slime-router slime-router-timeout slime-router-max-connections
        slime-router-health-check-failure-threshold overlap-p2p-communication
        overlap-p2p-communication-warmup-flush batch-p2p-communication enable-gloo-process-groups
        disable-gloo-process-groups use-tp-pp-dp-mapping use-sharp high-priority-stream-groups
        nccl-communicator-config-path distributed-timeout-seconds-after-init ddp-num-buckets""",
    "the schedule's position comes from the checkpoint, the rates from the command line": """
        override-opt-param-scheduler use-checkpoint-opt-param-scheduler""",
    "use --wandb-team, --wandb-group and --wandb-dir": "wandb-entity wandb-exp-name wandb-save-dir",
    "--use-pytorch-profiler records steps": "profile",
    "--nonfinite-action decides it": "check-for-nan-in-loss-and-grad",
    "code that comes with a model is not run": "trust-remote-code",
    "--lora-rank says it": "use-lora",
    "use --exp-avg-dtype, --exp-avg-sq-dtype and --main-grads-dtype": "use-precision-aware-optimizer",
    "slime names the files in --memory-snapshot-dir itself": "memory-snapshot-path",
    "all trainer ranks are profiled": "profile-ranks",
    "engines get the same weights in any encoding; --update-weight-delta-encoding chooses one here": """
        update-weight-encoding""",
    "no server is started for a teacher: --opd-type trainer holds it (--opd-teacher-load), and --opd-type "
    "engine asks the one at --rm-url": """
        teacher-port teacher-warmup-port teacher-warmup-timeout-s teacher-sample-reduction-chunk-size
        teacher-label-reduction-chunk-size megatron-server-max-length megatron-server-update-timeout-s
        megatron-server-warmup""",
}
# Flags that have no effect at one value, and are refused at any other.
_NEUTRAL = {
    "lr-warmup-init": ("0", "0.0"),
    "weight-decay-incr-style": ("constant",),
    "main-params-dtype": ("fp32",),
}
# Flags of other releases, or of Megatron's command line -> their names here.
RENAMED_FLAGS = {
    "--offload": ("--offload-train", "--offload-rollout"),
    "--recompute-activations": ("--recompute-granularity", "selective"),
    "--gradient-checkpointing": ("--activation-checkpointing", "full"),
    "--slime-router-middleware-paths": ("--router-middleware-paths",),
    "--no-check-for-nan-in-loss-and-grad": ("--nonfinite-action", "skip"),
    "--model-parallel-size": ("--tensor-model-parallel-size",),
    "--update-weight-delta-dir": ("--update-weight-disk-dir",),
    "--update-weight-delta-keep-files": ("--update-weight-disk-keep-files",),
}
_WHY_IDLE = {name: why for why, names in IDLE_FLAGS.items() for name in names.split()}
# Flags of plug-ins that slime has on its own command line: set as attributes of args.
PLUGIN_FLAGS = ("rollout-buffer-url", "fetch-trajectory-retry-times", "rollout-task-type")

# Our flags -> their names in TRL, verl and transformers.
_SYNONYMS = {
    "lr": "learning-rate learningrate",
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
    "rollout-batch-size": "train-batch-size batch-size num-prompts",
    "global-batch-size": "ppo-mini-batch-size",
    "micro-batch-size": "per-device-train-batch-size",
    "max-tokens-per-gpu": "ppo-max-token-len-per-gpu",
    "use-dynamic-batch-size": "use-dynamic-bsz",
    "clip-grad": "max-grad-norm grad-clip",
    "eps-clip": "epsilon clip-ratio clip-ratio-low",
    "eps-clip-high": "epsilon-high clip-ratio-high",
    "advantage-estimator": "adv-estimator",
    "loss-reduction": "loss-agg-mode",
    "disable-grpo-std-normalization": "scale-rewards",
    "num-epoch": "num-train-epochs total-epochs epochs num-epochs max-epochs",
    "num-rollout": "max-steps total-training-steps steps num-steps num-train-steps",
    "lr-warmup-iters": "warmup-steps",
    "lr-warmup-fraction": "warmup-ratio",
    "save": "output-dir default-local-dir",
    "save-interval": "save-steps save-freq",
    "eval-interval": "eval-steps test-freq",
    "load": "resume-from-checkpoint",
    "custom-rm-path": "reward-funcs custom-reward-function-path",
    "use-wandb": "report-to",
    "activation-checkpointing": "enable-gradient-checkpointing",
    "num-steps-per-rollout": "num-iterations steps-per-generation ppo-epochs",
    "sglang-mem-fraction-static": "gpu-memory-utilization vllm-gpu-memory-utilization",
    "actor-num-gpus-per-node": "n-gpus-per-node",
}
SYNONYMS = {theirs: ours for ours, names in _SYNONYMS.items() for theirs in names.split()}


def is_unbuilt(name: str) -> bool:
    """Return whether `name` (without dashes) is a flag of slime that this version refuses."""
    name = name.replace("_", "-")
    return name in UNBUILT_FLAGS or name in _NEUTRAL or _instead(name) is not None


def why_unbuilt(flag: str) -> str:
    """Return the error message for such a flag, spelled as the user wrote it."""
    instead = _instead(flag.removeprefix("--").replace("_", "-"))
    if instead is not None:
        return f"{flag}: {instead}."
    return f"{flag} is a flag of slime's or Megatron's that this version does not build yet."


def _instead(name: str) -> str | None:
    """Return the alternative to a flag; all flags that choose a teacher have one, whatever their name."""
    if name.startswith("teacher-") and name not in _WHY_IDLE:
        return _TEACHER
    return _INSTEAD.get(name) or REMOVED_FLAGS.get(name.removeprefix("no-"))


def is_neutral(option: str, words: Sequence[str]) -> bool:
    """Return whether an unsupported flag has the value at which it changes nothing."""
    neutral = _NEUTRAL.get(option.removeprefix("--").replace("_", "-"), ())
    return len(words) == 1 and words[0] in neutral


def renamed(words: Sequence[str]) -> list[str]:
    """Return a command line with the names that flags have here."""
    found, left = [], list(words)
    while left:
        word = left.pop(0)
        name, equals, value = word.partition("=")
        new = RENAMED_FLAGS.get(name)
        if name in DEADLINE_FLAGS:
            seconds = value if equals else left.pop(0) if left else ""
            found += ["--timeouts", "=".join(map(str, deadline_of(name, seconds)))]
        elif new is None or (equals and len(new) > 1):
            found.append(word)
        else:
            found += [new[0] + equals + value, *new[1:]]
    return found


def deadline_of(option: str, value: Any) -> tuple[str, Any]:
    """Return the deadline that a flag of another release sets, in seconds; an invalid value is unchanged."""
    name, unit = DEADLINE_FLAGS[option]
    try:
        return name, float(value) * unit
    except (TypeError, ValueError):
        return name, value


def renamed_key(name: str, value: Any) -> dict[str, Any]:
    """Return a key of a file (`gradient_checkpointing`) and its value, under the names used here."""
    option = option_of(name)
    if option in DEADLINE_FLAGS:
        return {"timeouts": dict([deadline_of(option, value)])}
    new = RENAMED_FLAGS.get(option, (option,))
    names = [name_of(word) for word in new]
    if len(new) == 1:
        return {names[0]: value}
    if value is not True:
        return {name: value}
    return dict.fromkeys(names, True) if new[1].startswith("--") else {names[0]: new[1]}


def why_idle(option: str) -> str | None:
    """Return why a flag such as `--moe-grouped-gemm` has no effect here; None: it is not such a flag."""
    name = option.removeprefix("--").replace("_", "-")
    return _WHY_IDLE.get(name) or _WHY_IDLE.get(name.removeprefix("no-"))
