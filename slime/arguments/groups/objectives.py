"""Flags and rules of models and data besides the policy: critic, distillation teacher, preference pairs."""

from dataclasses import dataclass

from slime.arguments.core.draft import Draft
from slime.arguments.core.flag import both, either, flag, having, lacks, needs
from slime.catalog.estimators import ESTIMATORS
from slime.catalog.loss_types import LOSS_TYPES
from slime.catalog.optimizers import OPTIMIZERS

PAIR_LOSSES = tuple(name for name, row in LOSS_TYPES.items() if row.has_pairs)
SUPERVISED_LOSSES = tuple(name for name, row in LOSS_TYPES.items() if row.is_supervised)
TOP_KLS = ("reverse_top_k", "forward_top_k")  # values of --opd-kl that read a teacher engine's top ids
# Names of --opd-type in recipes written for other versions.
OPD_TYPE_ALIASES = {"sglang": "engine", "megatron": "trainer"}


# -- when flags have an effect
POLICY_LOSS = needs("loss_type", "policy_loss")
CRITIC = both(
    needs("advantage_estimator", *having(ESTIMATORS, "needs_values")),
    lacks("loss_type", *SUPERVISED_LOSSES),
    said_by="advantage_estimator",
)
DISTILS = needs("use_opd")
TEACHER_IN_TRAINER = needs("opd_type", "trainer")
TOP_KL = needs("opd_kl", *TOP_KLS)
DPO = needs("loss_type", "dpo_loss")
NOT_PAIRS = lacks("loss_type", *PAIR_LOSSES)
REFERENCE = either(needs("use_kl_loss"), needs("kl_coef"), needs("loss_type", "dpo_loss"))
OLD_LOG_PROBS = both(needs("loss_type", "policy_loss"), lacks("use_rollout_logprobs"))


HAS_MOMENTS = needs("optimizer", *having(OPTIMIZERS, "moments"), harmless=True)


@dataclass
class KeptPolicyFlags:
    """Kept policies."""

    ref_update_interval: int | None = flag(
        None,
        "rollouts until the reference is set to the current policy",
        ge=1,
        only_with=REFERENCE,
    )
    keep_old_actor: bool = flag(
        False,
        "compute ratios against the weights that sampled the batch (asynchronous runs)",
        only_with=OLD_LOG_PROBS,
    )
    reset_optimizer_states: bool = flag(False, "reset the optimizer's moments before each rollout's training")
    use_stateless_adam: bool = flag(False, "reset Adam's moments before each step", only_with=HAS_MOMENTS)


@dataclass
class CriticFlags:
    """Critic."""

    megatron_config_path: str | None = flag(
        None, "YAML with settings of policy and critic alone (docs/algorithms.md)", metavar="FILE"
    )
    critic_load: str | None = flag(
        None, "model the critic starts from; default: --hf-checkpoint", metavar="MODEL", only_with=CRITIC
    )
    critic_lr: float | None = flag(None, "learning rate of the critic; default: --lr", ge=0, only_with=CRITIC)
    critic_lr_warmup_iters: int = flag(0, "steps of the critic's linear warm-up", ge=0, only_with=CRITIC)
    value_clip: float = flag(
        0.2, "how far a value may move before its error is clipped", gt=0, only_with=CRITIC
    )
    num_critic_only_steps: int = flag(0, "first rollouts that train the critic alone", ge=0, only_with=CRITIC)


@dataclass
class DistillationFlags:
    """On-policy distillation."""

    use_opd: bool = flag(False, "pull the policy towards a teacher on its own samples", only_with=POLICY_LOSS)
    opd_type: str | None = flag(
        None,
        "who holds the teacher: an engine at --rm-url (also called sglang) or the trainer (also called "
        "megatron)",
        choices=("engine", "trainer", *OPD_TYPE_ALIASES),
        only_with=DISTILS,
    )
    opd_kl: str = flag(
        "sampled",
        "reverse KL on the sampled token, in the advantage; or as a loss: over the vocabulary (trainer), or "
        "reverse or forward KL on the teacher's --opd-top-k (engine)",
        choices=("sampled", "full", *TOP_KLS),
        only_with=DISTILS,
    )
    opd_top_k: int = flag(
        64, "the teacher's most likely ids per token that --opd-kl reads", ge=1, only_with=TOP_KL
    )
    opd_kl_coef: float = flag(1.0, "weight of the reverse KL to the teacher", ge=0, only_with=DISTILS)
    opd_teacher_load: str | None = flag(
        None,
        "teacher of the trainer, or a folder of checkpoints",
        metavar="MODEL",
        only_with=(DISTILS, TEACHER_IN_TRAINER),
    )
    opd_teacher_ckpt_step: int | None = flag(
        None, "which checkpoint of --opd-teacher-load; default: last", ge=0
    )


@dataclass
class PreferenceFlags:
    """Preference pairs."""

    dpo_beta: float = flag(0.1, "beta of DPO: pull to the reference", gt=0, only_with=DPO)


def distillation(draft: Draft) -> None:
    if draft.opd_type in OPD_TYPE_ALIASES:
        draft.derive("opd_type", OPD_TYPE_ALIASES[draft.opd_type], f"another name of {draft.opd_type}")
    if not draft.use_opd:
        return
    if draft.opd_type is None:
        raise ValueError("--use-opd needs --opd-type: engine (--rm-url) or trainer (--opd-teacher-load).")
    if draft.opd_type == "trainer" and draft.opd_teacher_load is None:
        raise ValueError("--opd-type trainer needs --opd-teacher-load: the folder or hub id of the teacher.")
    if draft.opd_type == "engine" and draft.rollout_temperature != 1:
        draft.warn(
            f"--rollout-temperature {draft.rollout_temperature:g} with --opd-type engine: an engine scores "
            "tokens at temperature 1; --opd-type trainer divides the logits of policy and teacher."
        )
    if draft.opd_type == "engine" and draft.opd_kl == "full":
        raise ValueError(
            "--opd-kl full needs the teacher's whole distribution, and an engine returns log-probs of a few "
            "tokens; use --opd-type trainer, or --opd-kl reverse_top_k."
        )
    if draft.opd_type == "trainer" and draft.opd_kl in TOP_KLS:
        raise ValueError(
            f"--opd-kl {draft.opd_kl} is for a teacher on an engine; with --opd-type trainer use --opd-kl "
            "full, which is over the whole vocabulary."
        )


def preference_pairs(draft: Draft) -> None:
    if draft.loss_type == "rm_loss" and not draft.debug_train_only:
        raise ValueError(
            "--loss-type rm_loss trains a scorer that no engine can sample from; add --debug-train-only and "
            "--rollout-function-path slime.rollout.preference_rollout.generate_rollout."
        )
    if draft.loss_type == "dpo_loss" and draft.ref_load is None:
        draft.derive("ref_load", draft.hf_checkpoint, "DPO needs a reference; taken from hf_checkpoint")
