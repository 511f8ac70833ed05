"""Old module paths lead to the same objects, and say where they live now."""

import importlib
import pickle
import subprocess
import sys

import pytest

from slime import moved

PPO_UTILS = [
    "compute_approx_kl",
    "compute_policy_loss",
    "compute_cispo_loss",
    "compute_gspo_kl",
    "compute_opsm_mask",
    "vanilla_gae",
    "chunked_gae",
    "chunked_discounted_returns",
    "get_grpo_returns",
    "get_reinforce_plus_plus_returns",
    "get_reinforce_plus_plus_baseline_advantages",
    "get_advantages_and_returns_batch",
    "calculate_log_probs_and_entropy",
    "compute_log_probs",
]


@pytest.mark.parametrize("old", moved.MOVED)
def test_old_module_is_the_same_object_and_warns(old):
    sys.modules.pop(old, None)
    with pytest.warns(DeprecationWarning, match=f"{old} moved to {moved.MOVED[old]}") as caught:
        module = importlib.import_module(old)
    assert module is importlib.import_module(moved.MOVED[old])
    assert module.__spec__.name == moved.MOVED[old]
    assert len(caught) == 1


@pytest.mark.parametrize(
    ("old", "names"),
    [
        ("slime.utils.arguments", ["parse_args"]),
        ("slime.utils.data", ["Dataset", "read_file", "filter_long_prompt"]),
        (
            "slime.utils.eval_config",
            ["EvalDatasetConfig", "build_eval_dataset_configs", "ensure_dataset_list"],
        ),
        ("slime.utils.ppo_utils", PPO_UTILS),
        ("slime.backends.megatron_utils.cp_utils", ["all_gather_with_cp", "slice_log_prob_with_cp"]),
        ("slime.backends.megatron_utils.loss", ["icepop_function", "get_responses"]),
        ("slime.observability.tensorboard_utils", ["_TensorboardAdapter"]),
        ("slime.utils.external_utils.command_utils", ["execute_train", "exec_command", "convert_checkpoint"]),
        ("slime.rollout.rm_hub", ["grade_answer_verl", "get_deepscaler_rule_based_reward", "answer_text"]),
        ("slime.utils.processing_utils", ["build_processor_kwargs"]),
        ("slime.rollout.sleep_rollout", ["sleep"]),
        ("slime.record", ["Answer"]),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_names_that_users_import_are_there(old, names):
    module = importlib.import_module(old)
    assert [name for name in names if not callable(getattr(module, name, None))] == []


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_patch_under_the_old_name_reaches_the_new_one(monkeypatch):
    import slime.data.dataset

    monkeypatch.setattr("slime.utils.data.read_file", "patched")
    assert slime.data.dataset.read_file == "patched"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_facade_hands_out_the_functions_of_their_homes():
    facade = importlib.import_module("slime.utils.ppo_utils")
    for home, names in moved.FACADES["slime.utils.ppo_utils"].items():
        for name in names:
            assert getattr(facade, name) is getattr(importlib.import_module(home), name)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_objects_pickle_under_their_new_name():
    config_class = importlib.import_module("slime.utils.eval_config").EvalDatasetConfig
    assert config_class.__module__ == "slime.arguments.groups.eval_config"
    assert pickle.loads(pickle.dumps(config_class("a", "b"))) == config_class("a", "b")


def test_warning_points_at_the_line_of_the_import():
    code = "import slime\nfrom slime.utils.arguments import parse_args\n"
    done = subprocess.run(
        [sys.executable, "-W", "default", "-c", code], capture_output=True, text=True, check=True
    )
    assert "<string>:2: DeprecationWarning: slime.utils.arguments moved to slime.arguments" in done.stderr


def test_unknown_module_is_still_unknown():
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("slime.utils.no_such_module")
