"""No flag is accepted and ignored: each is read by the code that it steers, or used up while arguments are parsed."""

import ast
from pathlib import Path

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
    "num_gpus_per_node",
    "offload",
    "rollout_engine",
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
    for path in [*files, ROOT / "train.py", ROOT / "train_async.py"]:
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


def test_offered_rewards_are_those_of_the_hub():
    from slime.rollout.rm_hub import hub

    assert set(RM_TYPES) == set(hub.RM_TYPES)
