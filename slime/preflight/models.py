"""The models of a run: whether each can be loaded, and whether tokenizer and configuration fit together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from slime.arguments import Args
from slime.preflight.report import Finding
from slime.utils.model_config import read_config, vocabulary_of
from slime.utils.model_files import check_model
from slime.utils.processing_utils import load_tokenizer

FLAG = "--hf-checkpoint"


def check_model_files(args: Args) -> Iterator[Finding]:
    """Every folder or hub name that a flag gives, and the policy's configuration."""
    check_models(args)
    if args.hf_checkpoint is not None:
        yield from _check_config(args.hf_checkpoint)


def check_models(args: Args) -> None:
    """ValueError for the first that cannot be loaded. All but --hf-checkpoint may be checkpoints of a run."""
    if args.hf_checkpoint is not None:
        check_model(FLAG, args.hf_checkpoint, tokenizer=makes_prompts(args))
    others = {
        "--ref-load": args.ref_load,
        "--critic-load": args.critic_load,
        "--opd-teacher-load": args.opd_teacher_load,
    }
    others |= {f"model_path of {model.name}": model.model_path for model in args.engine_topology.models}
    for flag, model in others.items():
        if model is not None and model != args.hf_checkpoint:
            check_model(flag, model, whole=False)


def makes_prompts(args: Args) -> bool:
    """Whether a tokenizer is loaded: for engines always, else by the rollout functions of slime."""
    if args.load_debug_rollout_data:
        return False
    return not args.debug_train_only or args.rollout_function_path.startswith("slime.")


def _check_config(model: str) -> Iterator[Finding]:
    """Of a local folder: is it a configuration of an architecture that this transformers knows?"""
    config = read_config(model)
    if not config:
        return
    from transformers import __version__
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = config.get("model_type")
    if not kind:
        text = f"{model}/config.json names no model_type; it is no configuration of a language model."
        yield Finding("error", FLAG, text)
    elif kind not in CONFIG_MAPPING and "auto_map" not in config:
        text = f"{model}: transformers {__version__} knows no model_type {kind!r}; install a newer one."
        yield Finding("error", FLAG, text)


def check_tokenizer(args: Args) -> Iterator[Finding]:
    """The tokenizer against the model's vocabulary, and against what the prompts need of it."""
    if args.hf_checkpoint is None or not makes_prompts(args):
        return
    tokenizer = _load(args.hf_checkpoint)
    size = vocabulary_of(args.hf_checkpoint)
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if size is not None and largest >= size:
        yield Finding(
            "error",
            FLAG,
            f"the tokenizer has token ids up to {largest}, but the model's vocabulary ends at {size - 1}: "
            "tokenizer and weights are of different models.",
        )
    if needs_template(args) and not getattr(tokenizer, "chat_template", None):
        yield Finding(
            "error",
            "--apply-chat-template",
            f"the tokenizer of {args.hf_checkpoint} has no chat template; use an instruction-tuned model, "
            "put a chat_template.jinja into the folder, or leave the flag out and write prompts as text.",
        )


def needs_template(args: Args) -> bool:
    """Whether any prompt is made from messages."""
    return bool(args.apply_chat_template) or any(
        dataset.apply_chat_template for dataset in args.eval_datasets
    )


def _load(model: str) -> Any:
    try:
        return load_tokenizer(model)
    except Exception as error:  # tokenizer files that are damaged raise anything
        raise ValueError(
            f"{FLAG} {model}: its tokenizer cannot be loaded ({type(error).__name__}: {error}); copy the "
            "tokenizer's files again."
        ) from error
