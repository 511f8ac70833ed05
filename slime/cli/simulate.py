"""`slime simulate`: simulate a run before paying for it: step time, utilisation and waste."""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path

from slime.arguments import Args
from slime.arguments.core.draft import ASYNCHRONOUS, SYNCHRONOUS
from slime.arguments.groups.rollout import FULLY_ASYNC_ROLLOUT_FUNCTION
from slime.arguments.parser import parse_args
from slime.cli.bounded_numbers import MOST_GPUS, MOST_TOKENS, between
from slime.cli.main import RUN_STOPPED, user_errors

# The default run of --fuzz; each seed changes its sizes.
_FUZZED = "--hf-checkpoint none --rm-type math --rollout-batch-size 4 --n-samples-per-prompt 2 "
_FUZZED += "--rollout-max-response-len 16"
_WIDTH = 80  # columns of the output


def main(argv: Sequence[str] | None = None) -> int:
    options, words = split_flags(list(argv or ()))
    with user_errors(), tempfile.TemporaryDirectory() as folder:
        logging.disable(logging.WARNING)  # log lines of the loop are not about a real run
        try:
            args = _read(words, Path(folder), options)
            # Imported here: it loads torch, and a misspelt flag is reported without it.
            from slime.simulation import report

            if options.fuzz:
                from slime.simulation.fuzz import fuzz

                found = fuzz(args, options.fuzz, options.seed, log=lambda line: print(line, file=sys.stderr))
                print("\n".join(found.lines()))
                return RUN_STOPPED if found.failures else 0
            started = time.perf_counter()
            rows, about = report.simulate_splits(args, options)
        finally:
            logging.disable(logging.NOTSET)
        lines = [part for line in about for part in textwrap.wrap(line, _WIDTH, subsequent_indent="  ")]
        print("\n".join([*lines, *report.table(rows)]))
        print(f"simulated in {time.perf_counter() - started:.1f} s")
    return 0


def split_flags(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Split the flags into those of this command and those of the run."""
    if words and not words[0].startswith("-"):
        words = ["--config", *words]
    return _parser().parse_known_args(words)


def _read(words: list[str], folder: Path, options: argparse.Namespace) -> Args:
    """Return the settings of the run; prompts are replaced, because only lengths matter."""
    prompts = folder / "prompts.jsonl"
    prompts.write_text('{"input": "a prompt", "label": ""}\n')
    kind = SYNCHRONOUS if options.loop == "sync" else ASYNCHRONOUS
    if options.loop == "fully-async":
        words = [*words, "--rollout-function-path", FULLY_ASYNC_ROLLOUT_FUNCTION]
    words = [*words, "--prompt-data", str(prompts)]
    given = {word.partition("=")[0] for word in words}
    if not given & {"--num-rollout", "--num-epoch"}:
        words = [*words, "--num-rollout", str(options.steps)]
    if not given & {"--config", "--hf-checkpoint"}:
        if options.fuzz:
            words = [*_FUZZED.split(), *words]
        elif options.model is not None:
            words = [*words, "--hf-checkpoint", options.model]  # nothing of it is loaded
    return parse_args(words, training_loop=kind)


def _seconds(word: str) -> str:
    """Check MEAN[:SIGMA]."""
    for part in word.split(":", 1):
        between(0, 1e6)(part)
    return word


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="slime simulate",
        usage="slime simulate [run.yaml] [flags of slime train] [flags below]",
        description=__doc__.partition(":")[2].strip(),
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--loop", choices=("sync", "async", "fully-async"), default="sync", help="[sync]")
    add("--steps", type=between(1, 1_000_000, int), default=6, help="training steps to simulate [6]")
    add("--seed", type=int, default=0, help="seed of lengths, rewards and faults [0]")
    add("--lengths", default=None, metavar="MODEL",
        help="response lengths: fixed:N, uniform:LOW:HIGH, lognormal:MEAN:SIGMA or "
        "run:FOLDER (a recorded run) [lognormal, a quarter of --rollout-max-response-len, sigma 0.8]"
    )  # fmt: skip
    add("--prompt-tokens", type=between(1, MOST_TOKENS), default=256.0, help="length of a prompt [256]")
    add("--reward-s", type=_seconds, default="0", metavar="MEAN[:SIGMA]", help="seconds per reward [0]")
    failures = "share of rewards that fail [0]"
    add("--reward-failures", type=between(0, 1), default=0.0, metavar="SHARE", help=failures)
    add("--gpu", default="h200", help="kind of GPU [h200]")
    add("--model", default=None, metavar="NAME",
        help="name, such as qwen3-235b-a22b, or a folder with config.json [--hf-checkpoint]")  # fmt: skip
    add("--gpus", type=between(1, MOST_GPUS, int), default=None,
        help="try train:rollout splits of this number of GPUs [the split of the run only]")  # fmt: skip
    add("--fuzz", type=between(0, 1e9, int), default=0, metavar="N",
        help="simulate and audit N small runs with different faults; the first seed is --seed")  # fmt: skip
    return parser
