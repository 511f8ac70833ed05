"""The `slime` command: runs a subcommand, and reports a user's mistake as one clear line."""

import contextlib
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path

from slime.liveness.stacks import watch_exit
from slime.liveness.waits import WaitTimeout
from slime.utils.errors import EndedBySignal, FolderInUse, NotStarted, RunStopped
from slime.utils.files.restricted import create_restricted
from slime.utils.machine.garbage import search_new_only, search_seldom
from slime.utils.machine.own_command import as_typed
from slime.utils.printable import encode_anything

RUN_STOPPED, USER_MISTAKE, INTERRUPTED = 1, 2, 130  # exit codes


_HIDDEN, _NO_ACCESS = "hidden", ": choose another place, or ask for access to this one."
_BY_GOAL = {
    "get started": {
        "quickstart": "train a small model on this machine in minutes and show that it learned",
        "new": "create a folder for your own task: prompts, reward, settings, a test",
    },
    "check before you start": {
        "doctor": "check the flags, model, data and reward of a run without starting it",
        "plan": "show the memory and time of a run, and which engine runs on which GPUs",
        "simulate": "simulate a run before paying for it: step time, utilisation, waste, faults",
    },
    "train a model": {
        "sft": "fine-tune a model on conversations, or on prompts and completions",
        "dpo": "train a model on pairs of a preferred and a rejected response",
        "reward-model": "train a reward model on such pairs",
        "distill": "train a model on its own responses to imitate a teacher",
        "train": "train a model by reinforcement learning; takes every flag",
        "train-async": "train a model and generate the next rollout meanwhile, as `python train_async.py`",
        "sweep": "run one of these for several values and seeds, and compare them",
    },
    "use a trained model": {
        "eval": "evaluate a model on one or several data sets",
        "export": "write a trained model as a Hugging Face folder, with its LoRA adapter merged in",
        "serve": "serve a trained model with OpenAI's endpoints",
        "probe": "check that a server computes with exactly these weights, adapter and template",
    },
    "watch a run": {
        "status": "show the state of a run: step, reward, times, what it waits for, how it ended",
        "watch": "show the status of a run until it ends",
        "samples": "show prompts and the model's responses with their rewards",
        "ledger": "prove that no sample was lost or trained twice; show one with its tokens",
        "plot": "plot metrics of one or several runs, in the terminal or as a picture",
        "dashboard": "show runs in a browser: curves, samples, timeline, actions",
        "ask": "pause or stop a run, save or evaluate it now, change its learning rate",
        "engines": "let engines join or leave a run",
        "note": "give a run tags and a note, which the dashboard shows",
        "trace": "write where each step spent its time, for Perfetto",
    },
    "tools": {
        "track": "send an ended run to TensorBoard, W&B, trackio or MLflow",
        "migrate": "convert a launch script of THUDM/slime into a run.yaml",
        "weight-agent": "keep a copy of the weights next to an engine, and load new versions into it",
        "weight-publisher": "serve published weights to weight agents on other machines",
        "convert": "convert weights between Hugging Face folders, trainer checkpoints and FP8",
        "verify-model": "check that every trainer computes the same numbers as transformers for your "
        "architecture",
    },
    _HIDDEN: {"docs": "write the generated pages of docs/"},
}
_INSPECT = {*_BY_GOAL["watch a run"], "track"}  # modules in slime/cli/inspect
COMMANDS = {  # name: module, whose `main(argv)` returns an exit code or None
    name: f"slime.cli.{'inspect.' if name in _INSPECT else ''}{name.replace('-', '_')}"
    for commands in _BY_GOAL.values()
    for name in commands
}


def main(argv: Sequence[str] | None = None) -> int:
    try:
        try:
            return _main(argv)
        finally:
            if argv is None:
                search_new_only()
                watch_exit()
            if not sys.stdout.closed:
                sys.stdout.flush()  # here, where a broken pipe can be handled; also after `--help`
    except BrokenPipeError:  # `slime plot RUN | head`: the reader has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes the rest at exit
        return RUN_STOPPED


def _main(argv: Sequence[str] | None) -> int:
    if argv is None:  # called by the console script, so the process is ours
        search_seldom()
        for number, name in enumerate(("stdin", "stdout", "stderr")):
            if getattr(sys, name) is None:  # closed, as by `>&-`: no file of ours may get its number
                os.open(os.devnull, os.O_RDWR)
                setattr(sys, name, os.fdopen(number, "w" if number else "r"))
        encode_anything(sys.stdout)
        encode_anything(sys.stderr)
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] == ["help"] and argv[1:2]:
        return main([argv[1], "--help", *argv[2:]])
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(render_help())
        return 0 if argv else USER_MISTAKE
    name, rest = argv[0], argv[1:]
    if name in ("-V", "--version"):
        from slime import __version__  # no cycle: the package imports nothing from here

        print(f"slime {__version__}")
        return 0
    if name not in COMMANDS:
        near = get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean `{as_typed(*near)}`?" if near else f"`{as_typed('--help')}` lists the commands."
        print(f"error: unknown command {name!r}; {hint}", file=sys.stderr)
        return USER_MISTAKE
    try:
        return importlib.import_module(COMMANDS[name]).main(rest) or 0
    except KeyboardInterrupt:  # before or after a run, such as while torch is imported
        _say("interrupted")
        return INTERRUPTED


def render_help() -> str:
    lines = ["usage: slime <command> [flags]", "", "Train language models with reinforcement learning."]
    for goal, commands in _BY_GOAL.items():
        if goal != _HIDDEN:
            lines += ["", f"{goal}:", *(f"  {name:<16} {text}" for name, text in commands.items())]
    lines += ["", f"`{as_typed()} <command> --help` shows the flags of a command,"]
    return "\n".join([*lines, f"`{as_typed('train', '--help', 'WORD')}` the flags that mention a word."])


def _say(line: str) -> None:
    """Print a last line to stderr, even if the terminal is closed or the disk is full."""
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def user_errors(traceback_file: Path | None = None, *, spell: Callable[[str], str] = str) -> Iterator[None]:
    """End the command with one `error: ...` line where the exception says what to fix.

    ValueError, FileNotFoundError and PermissionError are mistakes of a user, exit code 2; RunStopped and an
    overdue wait end with 1. Any of them can also be a defect of ours, so a run that has a folder keeps the
    traceback there. `spell` rewrites the message.
    """
    try:
        yield
    except KeyboardInterrupt as error:
        _say("interrupted: all processes of the run have ended")
        # The convention of shells.
        raise SystemExit(128 + error.number if isinstance(error, EndedBySignal) else INTERRUPTED) from None
    except (ValueError, FileNotFoundError, PermissionError, RunStopped, WaitTimeout) as error:
        said = str(error)
        if isinstance(error, PermissionError):
            said = f"{f'{error.filename}: {error.strerror}' if error.filename else error}{_NO_ACCESS}"
        message = spell(said) or type(error).__name__
        if traceback_file is not None and not isinstance(error, (FolderInUse, NotStarted)):
            with contextlib.suppress(OSError):  # the message may be about a full disk
                traceback_file.parent.mkdir(parents=True, exist_ok=True)
                create_restricted(traceback_file)
                traceback_file.write_text(traceback.format_exc(), encoding="utf-8")
                message += f"\n(details: {traceback_file})"
        _say(f"error: {message}")
        raise SystemExit(USER_MISTAKE if isinstance(error, (ValueError, OSError)) else RUN_STOPPED) from None
