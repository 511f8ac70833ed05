"""Rules of distillation and preference flags: what each needs, and what it cannot stand beside."""

from slime.arguments.core.draft import Draft
from slime.arguments.groups.objectives import OPD_TYPE_ALIASES, PAIR_LOSSES


def distillation(draft: Draft) -> None:
    if draft.opd_type in OPD_TYPE_ALIASES:
        draft.derive("opd_type", OPD_TYPE_ALIASES[draft.opd_type], f"another name of {draft.opd_type}")
    if not draft.use_opd:
        return
    if draft.loss_type != "policy_loss":
        raise ValueError(
            f"--use-opd distils on the policy's own samples, but --loss-type is {draft.loss_type}; use "
            "policy_loss."
        )
    if draft.opd_type is None:
        raise ValueError(
            "--use-opd needs --opd-type: engine (a teacher behind --rm-url) or trainer (--opd-teacher-load)."
        )
    if draft.opd_type == "trainer" and draft.opd_teacher_load is None:
        raise ValueError("--opd-type trainer needs --opd-teacher-load: the folder or hub id of the teacher.")
    if draft.opd_type == "engine" and draft.rollout_temperature != 1:
        raise ValueError(
            f"--rollout-temperature is {draft.rollout_temperature:g} with --opd-type engine: an engine "
            "scores the teacher's tokens at "
            "temperature 1, so the two policies would not be comparable; use 1, or --opd-type trainer."
        )
    if draft.opd_type == "engine" and draft.opd_kl == "full":
        raise ValueError(
            "--opd-kl full needs the teacher's whole distribution, and an engine returns the sampled "
            "token's log-prob; use --opd-type trainer."
        )


def preference_pairs(draft: Draft) -> None:
    if draft.loss_type not in PAIR_LOSSES:
        return
    if draft.n_samples_per_prompt != 1:
        raise ValueError(
            f"--n-samples-per-prompt is {draft.n_samples_per_prompt} with --loss-type {draft.loss_type}: a "
            "row is one pair; use 1."
        )
    if draft.loss_type == "rm_loss" and not draft.debug_train_only:
        raise ValueError(
            "--loss-type rm_loss trains a scorer that no engine can sample from; add --debug-train-only and "
            "read the pairs with --rollout-function-path slime.rollout.preference_rollout.generate_rollout."
        )
    if draft.loss_type == "dpo_loss" and draft.ref_load is None:
        draft.derive("ref_load", draft.hf_checkpoint, "DPO needs a reference; taken from hf_checkpoint")
