"""No flag is accepted and ignored: each is read by what it steers, or used up while parsing."""

import ast
from pathlib import Path

import pytest
from source_trees import nodes_of

from slime.arguments import default_args
from slime.arguments.all_flags import all_specs
from slime.catalog.estimators import ESTIMATORS
from slime.catalog.policy_losses import POLICY_LOSS_ARGS, POLICY_LOSSES, REDUCTIONS
from slime.catalog.rewards import REWARDS
from slime.catalog.trackers import TRACKERS, tracker_options
from slime.utils.misc import load_function

ROOT = Path(__file__).parents[2]
# Their effect is on other arguments: a file that is read, a value that is derived, a check that is made.
USED_WHILE_PARSING = {
    "auto_resume",
    "sglang_router_policy",
    "freeze_indexer",
    "num_layers_per_virtual_pipeline_stage",
    "config",
    "print_config",
    "strict",
    "dump_details",
    "ci_train_rollout_logprob_abs_diff_threshold",
    "custom_config_path",
    "megatron_config_path",
    "allow_sampling_mismatch",
    "num_steps_per_rollout",
    "ref_ckpt_step",
    "opd_teacher_ckpt_step",
    "num_gpus_per_node",
    "sglang_config",
    "prefill_num_servers",
    "eval_config",
    "eval_prompt_data",
    "eval_env_num_items",
    "n_samples_per_eval_prompt",
    "eval_input_key",
    "eval_label_key",
    "eval_tool_key",
    "eval_temperature",
    "eval_top_p",
    "eval_top_k",
    "eval_max_response_len",
    "eval_min_new_tokens",
}


def names_read_outside_arguments() -> set[str]:
    names = set()
    for path in (ROOT / "slime").rglob("*.py"):
        if path.is_relative_to(ROOT / "slime" / "arguments"):
            continue
        for node in nodes_of(path):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                owner = (
                    node.value.attr
                    if isinstance(node.value, ast.Attribute)
                    else getattr(node.value, "id", "")
                )
                if owner.endswith("args"):
                    names.add(node.attr)
    return names


def test_every_flag_is_read_by_what_it_steers():
    of_trackers = set(tracker_options(default_args())) | {f"use_{name}" for name in TRACKERS}
    read = names_read_outside_arguments() | of_trackers
    assert sorted(set(all_specs()) - read - USED_WHILE_PARSING) == []


@pytest.mark.parametrize("row", [*ESTIMATORS.values(), *POLICY_LOSSES.values()])
def test_the_function_of_every_row_exists(row):
    assert callable(load_function(row.function))


def test_rows_name_flags_losses_baselines_and_reductions_that_exist():
    from slime.algorithms.reward_shaping import BASELINES

    assert {e.baseline for e in ESTIMATORS.values()} - {None} <= set(BASELINES)
    assert {e.policy_loss for e in ESTIMATORS.values()} <= set(POLICY_LOSSES)
    assert {e.reduction for e in ESTIMATORS.values()} - {None} <= set(REDUCTIONS)
    assert {name for loss in POLICY_LOSSES.values() for name in loss.args} == set(POLICY_LOSS_ARGS)


def test_every_reward_has_the_function_that_its_row_names():
    for reward in REWARDS.values():
        if reward.package is None:  # the others run where their package is installed
            assert callable(load_function(reward.function))


def test_a_run_has_at_most_340_flags_of_its_own():
    """Counted are declared flags, whichever spellings they have; those of SGLang and Megatron are not."""
    assert len(all_specs()) <= 340
