"""Flags of what stands beside the policy: the critic, the teacher of a distillation, preference pairs."""

from dataclasses import dataclass

from slime.arguments.core.flag import flag

# Losses over pairs of a preferred and a rejected answer.
PAIR_LOSSES = ("dpo_loss", "rm_loss")
# Loss types that take no advantages: what they train on is given, not scored.
SUPERVISED_LOSSES = ("sft_loss", *PAIR_LOSSES)
# Names of --opd-type in recipes written for other versions.
OPD_TYPE_ALIASES = {"sglang": "engine", "megatron": "trainer"}


@dataclass
class KeptPolicyFlags:
    """Kept policies."""

    ref_update_interval: int | None = flag(
        None, "rollouts after which the reference becomes the policy again", ge=1
    )
    keep_old_actor: bool = flag(
        False, "ratios against the weights that sampled the batch, kept since their push (asynchronous runs)"
    )
    reset_optimizer_states: bool = flag(
        False, "forget the optimizer's moments before each rollout's training"
    )


@dataclass
class CriticFlags:
    """Critic."""

    critic_load: str | None = flag(
        None,
        "model the critic starts from (a causal LM or a reward model); default: --hf-checkpoint",
        metavar="MODEL",
    )
    critic_lr: float | None = flag(None, "learning rate of the critic; default: --lr", ge=0)
    critic_min_lr: float = flag(0.0, "learning rate of the critic at the end of its decay", ge=0)
    critic_lr_decay_style: str = flag(
        "constant", "schedule of the critic after warm-up", choices=("constant", "linear", "cosine")
    )
    critic_lr_warmup_iters: int = flag(0, "optimizer steps of the critic's linear warm-up", ge=0)
    critic_clip_grad: float = flag(1.0, "largest gradient norm of the critic; 0 turns clipping off", ge=0)
    value_clip: float = flag(0.2, "how far a value may move in one update before its error is clipped", gt=0)
    num_critic_only_steps: int = flag(0, "rollouts at the start that train the critic alone", ge=0)


@dataclass
class DistillationFlags:
    """On-policy distillation."""

    use_opd: bool = flag(False, "pull the policy towards a teacher on the policy's own samples")
    opd_type: str | None = flag(
        None,
        "who has the teacher: an engine at --rm-url (sglang is the same), or the trainer (megatron is the "
        "same)",
        choices=("engine", "trainer", *OPD_TYPE_ALIASES),
    )
    opd_kl: str = flag(
        "sampled",
        "reverse KL on the sampled token, as part of the advantage, or over the full vocabulary, as a loss "
        "(trainer only)",
        choices=("sampled", "full"),
    )
    opd_kl_coef: float = flag(1.0, "weight of the reverse KL to the teacher", ge=0)
    opd_teacher_load: str | None = flag(
        None,
        "the teacher that the trainer holds, or a folder of checkpoints of a model like the policy",
        metavar="MODEL",
    )
    opd_teacher_ckpt_step: int | None = flag(
        None, "which checkpoint of --opd-teacher-load; default: the latest", ge=0
    )


@dataclass
class PreferenceFlags:
    """Preference pairs."""

    dpo_beta: float = flag(0.1, "how strongly DPO holds the policy to the reference", gt=0)
    dpo_label_smoothing: float = flag(0.0, "share of preferences that DPO takes to be wrong", ge=0, lt=0.5)
