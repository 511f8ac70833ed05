"""The `slime` command: runs a subcommand, and reports a user's mistake as one clear line."""

import contextlib
import importlib
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from slime.liveness.stacks import watch_exit
from slime.liveness.waits import WaitTimeout
from slime.utils.errors import EndedBySignal, FolderTaken, NotStarted, RunStopped
from slime.utils.files.restricted import create_restricted
from slime.utils.machine.garbage import search_no_more, search_seldom
from slime.utils.machine.open_files import open_missing_streams
from slime.utils.machine.own_command import as_typed

RUN_STOPPED, USER_MISTAKE, INTERRUPTED = 1, 2, 130  # exit codes


@dataclass(frozen=True)
class Command:
    """A subcommand: `module.main(argv)` returns an exit code or None."""

    module: str
    help: str
    hidden: bool = False
    goal: str = "tools"  # heading in `slime --help`


COMMANDS = {
    "quickstart": Command(
        "slime.cli.quickstart",
        "train a small model on this machine in minutes and show that it learned",
        goal="get started",
    ),
    "new": Command(
        "slime.cli.new",
        "create a folder for your own task: prompts, reward, settings, a test",
        goal="get started",
    ),
    "doctor": Command(
        "slime.cli.doctor",
        "check the flags, model, data and reward of a run without starting it",
        goal="check before you start",
    ),
    "plan": Command(
        "slime.cli.plan",
        "show which engine runs on which GPUs, and the memory and time of a trainer layout",
        goal="check before you start",
    ),
    "simulate": Command(
        "slime.cli.simulate",
        "simulate a run before paying for it: step time, utilisation, waste, faults",
        goal="check before you start",
    ),
    "train": Command(
        "slime.cli.train", "train a model; takes the flags of `python train.py`", goal="train a model"
    ),
    "train-async": Command(
        "slime.cli.train_async",
        "train a model and generate the next rollout meanwhile, as `python train_async.py`",
        goal="train a model",
    ),
    "status": Command(
        "slime.cli.inspect.status",
        "show the state of a run: step, reward, times, what it waits for, how it ended",
        goal="watch a run",
    ),
    "watch": Command("slime.cli.inspect.watch", "show the status of a run until it ends", goal="watch a run"),
    "samples": Command(
        "slime.cli.inspect.samples",
        "show prompts and the model's responses with their rewards",
        goal="watch a run",
    ),
    "ledger": Command(
        "slime.cli.inspect.ledger",
        "prove that no sample was lost or trained twice; show one with its tokens",
        goal="watch a run",
    ),
    "plot": Command(
        "slime.cli.inspect.plot",
        "plot metrics of one or several runs, in the terminal or as a picture",
        goal="watch a run",
    ),
    "dashboard": Command(
        "slime.cli.inspect.dashboard",
        "show runs in a browser: curves, samples, timeline, actions",
        goal="watch a run",
    ),
    "ask": Command(
        "slime.cli.inspect.ask",
        "pause or stop a run, save or evaluate it now, change its learning rate",
        goal="watch a run",
    ),
    "trace": Command(
        "slime.cli.inspect.trace",
        "write where each step spent its time, for Perfetto or OpenTelemetry",
        goal="watch a run",
    ),
    "track": Command("slime.cli.inspect.track", "send an ended run to TensorBoard, W&B, trackio or MLflow"),
    "migrate": Command("slime.cli.migrate", "convert a launch script of THUDM/slime into a run.yaml"),
    "weight-agent": Command(
        "slime.cli.weight_agent",
        "keep a copy of the weights next to an engine, and load new versions into it",
    ),
    "weight-publisher": Command(
        "slime.cli.weight_publisher", "serve published weights to weight agents on other machines"
    ),
    "convert": Command(
        "slime.cli.convert", "convert weights between Hugging Face folders, trainer checkpoints and FP8"
    ),
    "verify-model": Command(
        "slime.cli.verify_model",
        "check that every trainer computes the same numbers as transformers for your architecture",
    ),
    "docs": Command("slime.cli.docs", "write the generated pages of docs/", hidden=True),
}


def main(argv: Sequence[str] | None = None) -> int:
    open_missing_streams()
    try:
        try:
            return _main(argv)
        finally:
            if argv is None:
                search_no_more()
                watch_exit()
            if not sys.stdout.closed:
                sys.stdout.flush()  # here, where a broken pipe can be handled; also after `--help`
    except BrokenPipeError:  # `slime plot RUN | head`: the reader has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes the rest at exit
        return RUN_STOPPED


def _main(argv: Sequence[str] | None) -> int:
    if argv is None:  # this process runs nothing else
        search_seldom()
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
        return importlib.import_module(COMMANDS[name].module).main(rest) or 0
    except KeyboardInterrupt:  # before or after a run, such as while torch is imported
        _say("interrupted")
        return INTERRUPTED


def render_help() -> str:
    lines = [
        "usage: slime <command> [flags]",
        "",
        "Train language models with reinforcement learning.",
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
            f"`{as_typed('train', '--help', 'WORD')}` the flags that mention a word.",
        ]
    )


def _say(line: str) -> None:
    """Print a last line to stderr, even if the terminal is closed or the disk is full."""
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def user_errors(traceback_file: Path | None = None) -> Iterator[None]:
    """End the command with one `error: ...` line where the exception says what to fix.

    ValueError and FileNotFoundError are mistakes of a user, exit code 2; RunStopped and an overdue wait end
    with 1. Any of them can also be a defect of ours, so a run that has a folder keeps the traceback there.
    """
    try:
        yield
    except KeyboardInterrupt as error:
        _say("interrupted: all processes of the run have ended")
        code = (
            128 + error.number if isinstance(error, EndedBySignal) else INTERRUPTED
        )  # the convention of shells
        raise SystemExit(code) from None
    except (ValueError, FileNotFoundError, RunStopped, WaitTimeout) as error:
        message = str(error) or type(error).__name__
        if traceback_file is not None and not isinstance(error, (FolderTaken, NotStarted)):
            with contextlib.suppress(OSError):  # the message may be about a full disk
                traceback_file.parent.mkdir(parents=True, exist_ok=True)
                create_restricted(traceback_file)
                traceback_file.write_text(traceback.format_exc(), encoding="utf-8")
                message += f"\n(details: {traceback_file})"
        _say(f"error: {message}")
        code = USER_MISTAKE if isinstance(error, (ValueError, FileNotFoundError)) else RUN_STOPPED
        raise SystemExit(code) from None
