"""Adapts the settings of a run for a simulation: models and data are replaced by modelled ones."""

from __future__ import annotations

from typing import Any

from slime.arguments import Args
from slime.simulation.workload import PROMPTS, REWARD

_LEDGER_MIB = 256
_MEAN_UNITS = 12  # simulated tokens of a typical response

# Settings that need real samples, models or files.
_LEFT_OUT = """
    hf_checkpoint prompt_data eval_interval eval_config custom_generate_function_path
    custom_rollout_log_function_path custom_eval_rollout_log_function_path rollout_sample_filter_path
    rollout_all_samples_process_path buffer_filter_path save_hf
    save_debug_rollout_data load_debug_rollout_data multimodal_keys
    rollout_max_prompt_len num_epoch ckpt_step start_rollout_id save load
    rm_type reward_key
    rollout_data_postprocess_path
""".split()  # noqa: SIM905 - a list of words reads better as words
_LENGTHS = "rollout_max_response_len rollout_max_context_len max_tokens_per_gpu max_tokens_in_flight".split()  # noqa: SIM905


def simulated_args(args: Args, *, steps: int, unit: int, keeps: bool) -> Args:
    """`unit`: how many tokens one of the simulation stands for. `keeps`: with checkpoints and the ledger."""
    path = args.rollout_function_path
    if not path.startswith("slime.rollout."):
        raise ValueError(
            f"--rollout-function-path is {path}: only rollout functions of slime are simulated; its own "
            "waits would take real time."
        )
    known = vars(args)
    changes: dict[str, Any] = {name: None for name in _LEFT_OUT if name in known}
    changes |= {name: max(1, -(-known[name] // unit)) for name in _LENGTHS if known.get(name) and unit > 1}
    changes |= {
        "eval_datasets": [],
        "rollout_global_dataset": False,
        "apply_chat_template": False,
        "data_source_path": PROMPTS,
        "custom_rm_path": REWARD,
        "num_rollout": steps,
        "record_max_mib": _LEDGER_MIB if keeps else 0,
        "release_train": False,
        "debug_train_only": False,
        "debug_rollout_only": False,
        "use_rollout_routing_replay": False,
        "loss_mask_type": known.get("loss_mask_type"),
    }
    filter_path = args.dynamic_sampling_filter_path
    if filter_path is not None and not filter_path.startswith("slime."):
        changes["dynamic_sampling_filter_path"] = None
    return args.replace(**{name: value for name, value in changes.items() if name in known})


def unit_for(mean_length: float) -> int:
    """Return a power of two such that a typical response has about a dozen simulated tokens."""
    unit = 1
    while mean_length / (2 * unit) >= _MEAN_UNITS:
        unit *= 2
    return unit
