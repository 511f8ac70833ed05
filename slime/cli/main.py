"""The `slime` command: picks a subcommand, and turns mistakes of a user into one clear line."""

import contextlib
import importlib
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from slime.utils.errors import EndedBySignal, FolderTaken, NotStarted, RunStopped
from slime.utils.files.restricted import create_restricted
from slime.utils.machine.garbage import search_no_more, search_seldom
from slime.utils.machine.own_command import as_typed
from slime.utils.machine.stacks import watch_exit
from slime.utils.machine.standard_streams import open_missing
from slime.utils.waits import WaitTimeout

RUN_STOPPED, USER_MISTAKE, INTERRUPTED = 1, 2, 130  # exit codes


@dataclass(frozen=True)
class Command:
    """A subcommand: `module.main(argv)` returns an exit code or None."""

    module: str
    help: str
    hidden: bool = False
    goal: str = "tools"  # what one wants to do with it


COMMANDS = {
    "quickstart": Command(
        "slime.cli.quickstart",
        "train a small model on this machine in minutes, and show that it learned",
        goal="begin",
    ),
    "new": Command(
        "slime.cli.new",
        "make a folder for a task of your own: prompts, reward, settings, a test",
        goal="begin",
    ),
    "doctor": Command(
        "slime.cli.doctor",
        "look at the flags, model, data and reward of a run without starting it",
        goal="look before you start",
    ),
    "plan": Command(
        "slime.cli.plan",
        "show which engine would run on which GPUs, and what a trainer layout would cost",
        goal="look before you start",
    ),
    "simulate": Command(
        "slime.cli.simulate",
        "run a run on a virtual clock: step time, utilisation and waste of train:rollout splits, faults",
        goal="look before you start",
    ),
    "train": Command(
        "slime.cli.train", "train a model; same flags as `python train.py`", goal="train a model"
    ),
    "train-async": Command(
        "slime.cli.train_async",
        "the same with the next rollout in flight, as `python train_async.py`",
        goal="train a model",
    ),
    "status": Command(
        "slime.cli.inspect.status",
        "how a run is doing: step, reward, times, how it ended",
        goal="see what a run does",
    ),
    "watch": Command(
        "slime.cli.inspect.watch", "the same, renewed until the run ends", goal="see what a run does"
    ),
    "samples": Command(
        "slime.cli.inspect.samples",
        "show what the model was asked and what it answered, from a run's folder",
        goal="see what a run does",
    ),
    "ledger": Command(
        "slime.cli.inspect.ledger",
        "prove that no sample was lost or trained twice; show one with its tokens",
        goal="see what a run does",
    ),
    "plot": Command(
        "slime.cli.inspect.plot",
        "curves of any metrics of one run or several, in the terminal or as a picture",
        goal="see what a run does",
    ),
    "dashboard": Command(
        "slime.cli.inspect.dashboard",
        "the page of one run or several: curves, samples, timeline, actions, in a browser",
        goal="see what a run does",
    ),
    "ask": Command(
        "slime.cli.inspect.ask",
        "pause or stop a run, save or evaluate it now, change its learning rate, from any terminal",
        goal="see what a run does",
    ),
    "trace": Command(
        "slime.cli.inspect.trace",
        "what of each step took how long, as a file for Perfetto",
        goal="see what a run does",
    ),
    "track": Command(
        "slime.cli.inspect.track", "send a run to TensorBoard, W&B, trackio or MLflow after its end"
    ),
    "migrate": Command("slime.cli.migrate", "print the run.yaml that a launch script of slime amounts to"),
    "weight-agent": Command(
        "slime.cli.weight_agent",
        "keep a copy of the weights beside an engine, and have it load what is asked for",
    ),
    "weight-publisher": Command(
        "slime.cli.weight_publisher", "serve published weights to agents on other machines"
    ),
    "convert": Command(
        "slime.cli.convert", "weights between Hugging Face folders, trainer checkpoints and FP8"
    ),
    "verify-model": Command(
        "slime.cli.verify_model",
        "hold every trainer and layout against transformers on a small model of your architecture",
    ),
    "docs": Command(
        "slime.cli.docs", "write the pages of docs/ that are made from the declarations", hidden=True
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    open_missing()
    try:
        try:
            return _main(argv)
        finally:
            if argv is None:
                search_no_more()
                watch_exit()
            if not sys.stdout.closed:
                sys.stdout.flush()  # here, where somebody can take the error; also of `--help`
    except BrokenPipeError:  # `slime plot RUN | head`: whoever reads has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left is flushed at the exit
        return RUN_STOPPED


def _main(argv: Sequence[str] | None) -> int:
    if argv is None:  # the process is ours alone
        search_seldom()
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] == ["help"] and argv[1:2]:
        return main([argv[1], "--help", *argv[2:]])
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(render_help())
        return 0 if argv else USER_MISTAKE
    name, rest = argv[0], argv[1:]
    if name in ("-V", "--version"):
        from slime import __version__  # the package imports nothing from here, so this cannot be a cycle

        print(f"slime {__version__}")
        return 0
    if name not in COMMANDS:
        near = get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean `{as_typed(*near)}`?" if near else f"`{as_typed('--help')}` lists the commands."
        print(f"error: unknown command {name!r}; {hint}", file=sys.stderr)
        return USER_MISTAKE
    try:
        return importlib.import_module(COMMANDS[name].module).main(rest) or 0
    except KeyboardInterrupt:  # before or after a run: imports take seconds
        _say("interrupted")
        return INTERRUPTED


def render_help() -> str:
    lines = [
        "usage: slime <command> [flags]",
        "",
        "LLM post-training by reinforcement learning. What do you want to do?",
    ]
    shown = {name: command for name, command in COMMANDS.items() if not command.hidden}
    for goal in dict.fromkeys(command.goal for command in shown.values()):
        lines += ["", f"{goal}:"]
        lines += [f"  {name:<16} {command.help}" for name, command in shown.items() if command.goal == goal]
    return "\n".join(
        [
            *lines,
            "",
            f"`{as_typed()} <command> --help` shows the flags of a command,",
            f"`{as_typed('train', '--help', 'WORD')}` those that mention a word.",
        ]
    )


def _say(line: str) -> None:
    """The last word of a command; a terminal that was closed, or a full disk, changes nothing of its end."""
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def user_errors(traceback_file: Path | None = None) -> Iterator[None]:
    """End with one `error: ...` on stderr when the exception
    says what to fix; anything else is a defect and rises.

    ValueError and FileNotFoundError are mistakes of a user, exit code 2;
    RunStopped and an overdue wait end with 1. Each can also be a defect of ours,
    so a run that got far enough to have a folder keeps the traceback there.
    """
    try:
        yield
    except KeyboardInterrupt as error:
        _say("interrupted: all processes of the run were ended")
        code = 128 + error.number if isinstance(error, EndedBySignal) else INTERRUPTED  # as shells count
        raise SystemExit(code) from None
    except (ValueError, FileNotFoundError, RunStopped, WaitTimeout) as error:
        message = str(error) or type(error).__name__
        if traceback_file is not None and not isinstance(error, (FolderTaken, NotStarted)):
            with contextlib.suppress(OSError):  # a full disk may be what the message is about
                traceback_file.parent.mkdir(parents=True, exist_ok=True)
                create_restricted(traceback_file)
                traceback_file.write_text(traceback.format_exc(), encoding="utf-8")
                message += f"\n(details: {traceback_file})"
        _say(f"error: {message}")
        code = USER_MISTAKE if isinstance(error, (ValueError, FileNotFoundError)) else RUN_STOPPED
        raise SystemExit(code) from None
