"""The rules in the order they run: each refuses a combination with reason and fix, or derives a value.

Every rule stands beside the flags that it is about, in groups/.
"""

from collections.abc import Callable

from slime.arguments.args import Args
from slime.arguments.core.draft import (
    ASYNCHRONOUS,
    Draft,
    Refusals,
    refuse_flags_without_effect,
    tell_idle_flags,
)
from slime.arguments.groups.agents import environment, turn_credit
from slime.arguments.groups.algorithm import (
    group_normalisation,
    loss,
    loss_reduction,
    policy_loss,
    reference_model,
)
from slime.arguments.groups.checkpoints import checkpoints, kept_models, megatron_checkpoints
from slime.arguments.groups.cluster import devices, peer_copies, release_train
from slime.arguments.groups.data import columns, length_of_run
from slime.arguments.groups.engine import drafting_heads, engine_choice, reproducible_engine, weight_sync
from slime.arguments.groups.evaluation import evaluation
from slime.arguments.groups.images import images
from slime.arguments.groups.megatron import choose_trainer, megatron_trainer, model_family
from slime.arguments.groups.micro_batches import keep_micro_batches, micro_batches, token_limit
from slime.arguments.groups.objectives import distillation, preference_pairs
from slime.arguments.groups.off_policy import correct_stale_tokens, off_policy
from slime.arguments.groups.paths import absolute_paths
from slime.arguments.groups.precision import engine_precision, fp8_training
from slime.arguments.groups.profiling import profiling
from slime.arguments.groups.rewards import reward_shaping, rewards
from slime.arguments.groups.roles import critic_role
from slime.arguments.groups.rollout import (
    context_length,
    fully_async_rollout,
    over_sampling,
    sampling,
    spare_samples,
    staleness_bound,
)
from slime.arguments.groups.run import (
    auto_resume,
    check_paths_exist,
    debug_modes,
    dumps_and_assertions,
    needed_flags,
    run_folder,
    seeds,
)
from slime.arguments.groups.topology import router, topology, topology_source
from slime.arguments.groups.trained_sampling import trained_sampling
from slime.arguments.groups.trainer import model_parallel_sizes, trainable_parameters
from slime.arguments.groups.training import derive_batch, learning_rate

Rule = Callable[[Draft], None]

RULES: tuple[Rule, ...] = (
    choose_trainer,
    debug_modes,
    dumps_and_assertions,
    megatron_checkpoints,
    environment,  # before what is needed: it brings prompts and a generate function
    needed_flags,
    sampling,
    context_length,
    over_sampling,
    spare_samples,
    length_of_run,
    columns,
    loss,
    policy_loss,
    loss_reduction,
    group_normalisation,
    turn_credit,
    reference_model,
    distillation,
    preference_pairs,
    kept_models,
    correct_stale_tokens,
    off_policy,
    derive_batch,
    micro_batches,
    learning_rate,
    reward_shaping,
    rewards,
    evaluation,
    checkpoints,
    topology_source,  # before the engine is chosen: what is asked for must make sense whatever is installed
    engine_choice,
    trained_sampling,
    reproducible_engine,
    release_train,
    peer_copies,
    weight_sync,
    drafting_heads,
    refuse_flags_without_effect,
    fully_async_rollout,
    megatron_trainer,
    model_family,
    devices,
    topology,
    router,
    trainable_parameters,
    fp8_training,
    engine_precision,
    images,
    model_parallel_sizes,
    profiling,
    critic_role,
    check_paths_exist,
    absolute_paths,  # these four before settings are compared with those of the folder's run
    seeds,
    token_limit,
    keep_micro_batches,
    auto_resume,
    run_folder,
    tell_idle_flags,
)


def apply_rules(draft: Draft, refusals: Refusals) -> None:
    """Run every rule once. A rule may rely on what the rules before it derived."""
    for rule in RULES:
        with refusals.collect("Settings"):
            rule(draft)


def for_asynchronous_loop(args: Args) -> Args:
    """The settings as if they had been parsed for that loop: scripts may parse before they choose it."""
    draft = args.reopen(training_loop=ASYNCHRONOUS)
    correct_stale_tokens(draft)
    staleness_bound(draft)
    return Args.of(draft)
