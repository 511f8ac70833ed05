"""Calls a user's functions: after start, before passes and optimizer steps, and to build the model."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron.core.optimizer import MegatronOptimizer
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from slime.arguments import Args
from slime.backends.base import StepPlace
from slime.backends.megatron.modules.model import PackedGPTModel
from slime.backends.shared.learning_rate import learning_rate
from slime.utils.misc import load_function
from slime.utils.plugin_errors import plugin_call


@dataclass(frozen=True, slots=True)
class LearningRateSchedule:
    """Replaces Megatron's learning rate scheduler in a user's hook; returns the rate of the current step."""

    args: Args
    num_steps: int  # optimizer steps taken
    decay_steps: int | None

    def get_lr(self) -> float:
        return learning_rate(self.args, self.num_steps, self.decay_steps)


def after_init(args: Args) -> None:
    """Call the hook when the process groups exist and the model is not built yet."""
    path = args.custom_megatron_init_path
    if path:
        with plugin_call("--custom-megatron-init-path", path):
            load_function(path)(args)


def before_log_prob(args: Args, model: Sequence[nn.Module], weights: str) -> None:
    """Call the hook before each pass whose log-probs are stored as `store_prefix` + "log_probs"."""
    path = args.custom_megatron_before_log_prob_hook_path
    if path:
        prefix = f"{weights}_" if weights in ("ref", "teacher") else ""
        with plugin_call("--custom-megatron-before-log-prob-hook-path", path):
            load_function(path)(args, list(model), prefix)


def before_train_step(
    args: Args,
    place: StepPlace,
    model: Sequence[nn.Module],
    optimizer: MegatronOptimizer,
    schedule: LearningRateSchedule,
) -> None:
    """Call the hook before each optimizer step, when gradients are zero and no pass has run."""
    path = args.custom_megatron_before_train_step_hook_path
    if path:
        with plugin_call(
            "--custom-megatron-before-train-step-hook-path",
            path,
            lambda: f"step {place.step_id} of rollout {place.rollout_id}",
        ):
            load_function(path)(args, place.rollout_id, place.step_id, list(model), optimizer, schedule)


def provide_model(
    path: str,
    config: TransformerConfig,
    build: Callable[[], PackedGPTModel],
    *,
    pre_process: bool,
    post_process: bool,
    vp_stage: int | None,
) -> PackedGPTModel:
    """Return the user's model of one chunk; `build` makes the default one."""
    function = load_function(path)
    offered = {"vp_stage": vp_stage, "config": config, "build": build}
    taken = inspect.signature(function).parameters
    with plugin_call("--custom-model-provider-path", path):
        options = {name: value for name, value in offered.items() if name in taken}
        model = function(pre_process, post_process, **options)
    if not isinstance(model, PackedGPTModel):
        raise ValueError(
            f"--custom-model-provider-path {path} returned a {type(model).__name__}: the trainer runs "
            "packed samples and needs a slime.backends.megatron.modules.model.PackedGPTModel (a GPTModel): "
            "take the `build` keyword and change what it returns."
        )
    return model
