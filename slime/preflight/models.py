"""Checks that each model of a run can be loaded, and that tokenizer and configuration fit together."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slime.arguments import Args
from slime.backends.families import COMPUTED_AS
from slime.catalog.engines import ENGINES
from slime.catalog.families import is_verified, refusal
from slime.catalog.tool_formats import TEMPLATE_REPORT
from slime.preflight.findings import Finding, error_of
from slime.rollout.prompt_formats import is_conversation
from slime.utils.files.safetensors_files import damaged_files, model_files
from slime.utils.misc import load_function
from slime.utils.models.model_config import read_config, vocabulary_of
from slime.utils.models.model_files import check_model
from slime.utils.processing_utils import load_tokenizer

FLAG = "--hf-checkpoint"


def check_model_files(args: Args) -> Iterator[Finding]:
    """Check every model folder or hub name that a flag gives, and the policy's configuration."""
    models = {FLAG: args.hf_checkpoint, "--ref-load": args.ref_load, "--critic-load": args.critic_load}
    models |= {"--opd-teacher-load": args.opd_teacher_load}
    models |= {f"model_path of {model.name}": model.model_path for model in args.engine_topology.models}
    wrong = []
    for flag, model in models.items():
        policy = flag == FLAG
        if model is None or (not policy and model == args.hf_checkpoint):
            continue
        try:
            check_model(flag, model, tokenizer=policy and makes_prompts(args), whole=policy)
        except ValueError as error:
            wrong.append(flag)
            yield error_of(flag, error)
        else:
            if why := why_no_config(model) or (None if policy else next(damaged_files(Path(model)), None)):
                wrong.append(flag)
                yield Finding("error", flag, why)
    if FLAG not in wrong and args.hf_checkpoint is not None:
        yield from _check_families(args)


def _check_families(args: Args) -> Iterator[Finding]:
    """Refuse to train families that were never compared with transformers."""
    if args.debug_rollout_only or args.allow_unverified_model or args.custom_model_provider_path:
        return
    trained = {FLAG: args.hf_checkpoint, "--critic-load": args.critic_load}
    trained |= {"--opd-teacher-load": args.opd_teacher_load}
    for flag, path in trained.items():
        kind = None if path is None else read_config(path).get("model_type")
        if kind is not None and not is_verified(kind, args.train_backend):
            yield Finding("error", flag, refusal(path, kind))


def check_weights(args: Args) -> Iterator[Finding]:
    """Check that the files of the initial weights exist and are complete, if they are in a local folder."""
    folder = Path(args.hf_checkpoint or "")
    resumes = args.load is not None and Path(args.load).is_dir()
    if args.hf_checkpoint is None or args.start_from != args.hf_checkpoint or resumes or not folder.is_dir():
        return
    of_their_own = args.rollout_external_engine_addrs or ENGINES[args.rollout_engine].own_python
    if args.debug_rollout_only and of_their_own:
        return  # engines may load them from another folder
    files = model_files(folder)
    if not files and not any(folder.glob("*.bin*")):
        yield Finding("error", FLAG, f"{folder} holds no weights: no *.safetensors and no *.bin file.")
    yield from (Finding("error", FLAG, text) for text in damaged_files(folder))


def makes_prompts(args: Args) -> bool:
    """Return whether a tokenizer is loaded: for engines always, else by the rollout functions of slime."""
    if args.load_debug_rollout_data:
        return False
    return not args.debug_train_only or args.rollout_function_path.startswith("slime.")


def why_no_config(model: str) -> str | None:
    """Return why the installed transformers cannot build the model of a local folder; None: it can."""
    return _why_unknown(model, read_config(model)) if (Path(model) / "config.json").is_file() else None


def _why_unknown(model: str, config: dict[str, Any]) -> str | None:
    from transformers import AutoConfig, __version__
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = config.get("model_type")
    if not kind:
        return f"{model}/config.json names no model_type; it is no configuration of a language model."
    if "auto_map" in config:
        return None
    if kind not in CONFIG_MAPPING:
        text = f"{model}: transformers {__version__} knows no model_type {kind!r}; install a newer one."
        return None if kind in COMPUTED_AS else text
    try:
        AutoConfig.from_pretrained(model)
    except Exception as error:  # a model may raise anything for an invalid value
        said = " ".join(f"{type(error).__name__}: {error}".split())
        return f"{model}/config.json is refused by transformers ({said}); correct it, or copy it again."
    return None


def check_tokenizer(args: Args) -> Iterator[Finding]:
    """Check the tokenizer against the model's vocabulary and against the format of the prompts."""
    if args.hf_checkpoint is None or not makes_prompts(args):
        return
    try:
        tokenizer = load_tokenizer(args.hf_checkpoint)
    except Exception as error:  # tokenizer files that are damaged raise anything
        why = f"its tokenizer cannot be loaded ({type(error).__name__}: {error}); copy its files again."
        raise ValueError(f"{FLAG} {args.hf_checkpoint}: {why}") from error
    yield from _check_vocabulary(args.hf_checkpoint, tokenizer)
    if needs_template(args) and not getattr(tokenizer, "chat_template", None):
        text = (
            f"the tokenizer of {args.hf_checkpoint} has no chat template, which turns messages into text; "
            "use an instruction-tuned model, put a chat_template.jinja into the folder, or leave the flag "
            "out and write prompts as text."
        )
        yield Finding("error", "--apply-chat-template", text)
    if args.custom_generate_function_path is not None:
        yield from template_notes(tokenizer)


def template_notes(tokenizer: Any) -> Iterator[Finding]:
    """Report how the chat template treats earlier turns, and where sessions fork."""
    if not getattr(tokenizer, "chat_template", None):
        return
    report = load_function(TEMPLATE_REPORT)(tokenizer)
    text = "it has the prefix property: the turns of a session are one sample"
    if not report.extends:
        text = "new messages cannot be appended to a response; every turn of a session is a sample of its own"
    elif report.forks:
        where = " and ".join(report.forks)
        text = (
            f"a session forks at {where}, which the template leaves out then: each fork is one more sample "
        )
        text += "of the episode; history='extend' of the session keeps thoughts and one sample"
    refused = f"; it does not take {' or '.join(report.refuses)}" if report.refuses else ""
    yield Finding("note", "chat template", f"{text}{refused}.")


def _check_vocabulary(model: str, tokenizer: Any) -> Iterator[Finding]:
    """Compare token ids with the embedding matrix; added tokens, such as padding, may never occur."""
    size = vocabulary_of(model)
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if size is None or largest < size:
        return
    text = f"the tokenizer has token ids up to {largest}, but the model's vocabulary ends at {size - 1}"
    if tokenizer.vocab_size > size:  # without added tokens
        yield Finding("error", FLAG, f"{text}: tokenizer and weights are of different models.")
    else:
        yield Finding("warning", FLAG, f"{text}: prompts must not contain such an added token.")


def needs_template(args: Args) -> bool:
    """Return whether slime renders some prompts from messages."""
    if args.apply_chat_template or (is_conversation(args) and args.loss_mask_type != "text"):
        return True
    return any(dataset.apply_chat_template for dataset in args.eval_datasets)
