"""No flag is accepted and ignored: each is read by the code that it steers, or used up while arguments are parsed."""

import ast
from pathlib import Path

from slime.arguments import algorithm, off_policy
from slime.arguments.algorithm import ADVANTAGE_ESTIMATORS
from slime.arguments.groups import all_specs
from slime.arguments.rewards import RM_TYPES

ROOT = Path(__file__).parents[2]
# Their effect is on other arguments: a file that is read, a value that is derived, a check that is made.
USED_WHILE_PARSING = {
    "config",
    "print_config",
    "custom_config_path",
    "allow_sampling_mismatch",
    "num_steps_per_rollout",
    "ref_ckpt_step",
    "opd_teacher_ckpt_step",
    "num_gpus_per_node",
    "offload",
    "sglang_config",
    "prefill_num_servers",
    "eval_config",
    "eval_prompt_data",
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
    files = [path for path in (ROOT / "slime").rglob("*.py") if "arguments" not in path.parts]
    names = set()
    for path in files:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                owner = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", "")
                if owner.endswith("args"):
                    names.add(node.attr)
    return names


def test_every_flag_is_read_by_what_it_steers():
    assert sorted(set(all_specs()) - names_read_outside_arguments() - USED_WHILE_PARSING) == []


def test_every_offered_estimator_exists():
    from slime.algorithms.advantages import get_estimator

    for name in ADVANTAGE_ESTIMATORS:
        assert get_estimator(name)


def test_what_the_rules_say_about_estimators_and_losses_is_what_the_tables_say():
    from slime.algorithms.advantages import ESTIMATORS
    from slime.algorithms.off_policy import LEVELS
    from slime.algorithms.policy_loss import POLICY_LOSSES
    from slime.algorithms.reduce import REDUCTIONS

    assert set(ESTIMATORS) - {"ppo"} <= set(algorithm.ADVANTAGE_ESTIMATORS) <= set(ESTIMATORS)
    assert {n for n, e in ESTIMATORS.items() if e.uses_kl_in_reward} == set(algorithm.ESTIMATORS_WITH_KL)
    assert {n for n, e in ESTIMATORS.items() if e.uses_gamma} == set(algorithm.ESTIMATORS_WITH_GAMMA)
    grouped = {n for n, e in ESTIMATORS.items() if e.baseline not in (None, "greedy")}
    assert grouped == set(algorithm.ESTIMATORS_WITH_GROUPS)
    assert {n for n, e in ESTIMATORS.items() if e.scale_rewards} == set(algorithm.ESTIMATORS_WITH_STD)
    assert tuple(POLICY_LOSSES) == algorithm.POLICY_LOSS_TYPES
    assert tuple(REDUCTIONS) == algorithm.LOSS_REDUCTIONS
    assert off_policy.LEVELS == LEVELS


def test_offered_rewards_are_those_of_the_hub():
    from slime.rollout.rm_hub import hub

    assert set(RM_TYPES) == set(hub.RM_TYPES)
