"""Lists the rules in the order in which they run; each is declared next to its flags, in groups/."""

from collections.abc import Callable

from slime.arguments.args import Args
from slime.arguments.core import draft as drafts
from slime.arguments.core.draft import ASYNCHRONOUS, Draft, Refusals
from slime.arguments.groups import (
    agents,
    algorithm,
    checkpoints,
    cluster,
    data,
    engine,
    evaluation,
    images,
    megatron,
    micro_batches,
    objectives,
    off_policy,
    paths,
    precision,
    profiling,
    rewards,
    roles,
    rollout,
    run,
    topology,
    trained_sampling,
    trainer,
    training,
)

Rule = Callable[[Draft], None]

RULES: tuple[Rule, ...] = (
    megatron.choose_trainer,
    checkpoints.within_run_dir,
    run.debug_modes,
    run.dumps_and_assertions,
    checkpoints.megatron_checkpoints,
    agents.environment,  # before `required`: it adds prompts and a generate function
    run.needed_flags,
    rollout.sampling,
    rollout.context_length,
    rollout.over_sampling,
    data.length_of_run,
    data.columns,
    algorithm.loss,
    algorithm.policy_loss,
    algorithm.loss_reduction,
    algorithm.group_normalisation,
    agents.turn_credit,
    algorithm.reference_model,
    objectives.distillation,
    objectives.preference_pairs,
    checkpoints.kept_models,
    off_policy.correct_stale_tokens,
    off_policy.off_policy,
    training.derive_batch,
    micro_batches.micro_batches,
    training.optimizer,
    training.learning_rate,
    rewards.reward_shaping,
    rewards.rewards,
    evaluation.evaluation,
    checkpoints.checkpoints,
    # Before the engine is chosen: settings must be consistent whatever is installed.
    topology.topology_source,
    engine.engine_choice,
    trained_sampling.trained_sampling,
    engine.reproducible_engine,
    cluster.release_train,
    cluster.peer_copies,
    engine.weight_sync,
    drafts.refuse_flags_without_effect,
    rollout.fully_async_rollout,
    megatron.megatron_trainer,
    megatron.model_family,
    cluster.devices,
    topology.topology,
    topology.router,
    trainer.trainable_parameters,
    precision.fp8_training,
    precision.engine_precision,
    images.images,
    trainer.model_parallel_sizes,
    profiling.profiling,
    roles.critic_role,
    run.check_paths_exist,
    paths.absolute_paths,  # these four run before settings are compared with the folder's run
    run.seeds,
    micro_batches.token_limit,
    micro_batches.keep_micro_batches,
    run.auto_resume,
    run.run_folder,
    drafts.report_idle_flags,
)


def apply_rules(draft: Draft, refusals: Refusals) -> None:
    """Run every rule once. A rule may rely on what the rules before it derived."""
    for rule in RULES:
        with refusals.collect("Settings"):
            rule(draft)


def for_asynchronous_loop(args: Args) -> Args:
    """Adapt settings that were parsed before the loop was chosen, as scripts do."""
    draft = args.reopen(training_loop=ASYNCHRONOUS)
    off_policy.correct_stale_tokens(draft)
    rollout.staleness_bound(draft)
    return Args.of(draft)
