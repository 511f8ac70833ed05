"""`slime samples RUN`: show prompts and the model's responses with their rewards, from a run's record."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.rule import Rule
from rich.text import Text

from slime.catalog.loss_types import describe_reward
from slime.cli.bounded_numbers import between
from slime.cli.inspect import command, need_run, report_copy, run_parser
from slime.record import Record, RecordedSample, RecordError, Select, open_record
from slime.utils.files.run_file import read_run
from slime.utils.printable import cut_lines, printable

_DIFF_PROMPTS = 5


@command
def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    report_copy(options.run)
    try:
        with open_record(options.run) as record:
            samples = _differences(record, options) if options.diff else record.samples(_select(options))
            where = "" if samples else _why_none(record, options)
    except RecordError:
        need_run(options.run)
        raise
    if options.json:
        for sample in samples:
            print(json.dumps(dataclasses.asdict(sample), ensure_ascii=False))
        return 0 if samples else 1
    run = read_run(options.run)
    settings = run.last.values if run is not None else {}
    console = Console(highlight=False, soft_wrap=not sys.stdout.isatty())
    for sample in samples:
        whole = options.full or not console.is_terminal
        console.print(render_sample(sample, console.width, settings=settings, whole=whole))
    if where:
        print(where, file=sys.stderr)
    return 0 if samples else 1


def render_sample(
    sample: RecordedSample,
    width: int,
    *,
    settings: Mapping[str, Any],
    whole: bool,
    num_lines: tuple[int, int] = (6, 14),
) -> RenderableType:
    """Render a response with prompt, label, reward and outcome; texts have `num_lines` unless `whole`.

    `settings`: those of the run, which say what a reward means.
    """

    def shown(text: str, lines: int) -> str:
        return printable(text) if whole else cut_lines(printable(text), lines, max(width - 2, 20))

    judged = describe_reward(settings, sample.reward)
    colour = "green" if (sample.reward or 0) > 0 else "red"
    label = [] if sample.label is None else [Text.assemble(("label ", "dim"), shown(sample.label, 3))]
    return Group(
        Rule(Text(_title(sample, judged), style="bold"), align="left", style="dim"),
        Text(shown(sample.prompt, num_lines[0]), style="dim"),
        Text(shown(sample.response, num_lines[1]), style=colour if judged else ""),
        *label,
    )


def _title(sample: RecordedSample, judged: str) -> str:
    what = f"evaluation {sample.rollout_id}" if sample.kind == "eval" else f"step {sample.rollout_id}"
    parts = [what + (f" {sample.dataset}" if sample.dataset else ""), f"sample {sample.sample_index}"]
    parts += [judged] if judged else []
    parts.append(f"{sample.num_tokens} tokens, {sample.status}")
    if sample.outcome not in ("trained", "evaluated"):
        parts.append(f"{sample.outcome}: {sample.reason}" if sample.reason else sample.outcome)
    if sample.failure:
        parts.append(sample.failure)
    return printable(" · ".join(parts)).replace("\n", " ")


def _select(options: argparse.Namespace) -> Select:
    by_reward = options.worst or options.best
    return Select(
        kind="eval" if options.eval is not None else "train" if options.step is not None else None,
        rollout_id=options.step,
        dataset=options.eval or None,
        outcome=options.outcome,
        contains=options.contains,
        order="worst" if options.worst else "best" if options.best else "made",
        limit=by_reward or options.limit,
    )


def _differences(record: Record, options: argparse.Namespace) -> list[RecordedSample]:
    """Return responses to the same prompts in two steps; of evaluations if training repeats no prompt."""
    early, late = options.diff
    for kind in ("eval",) if options.eval is not None else ("train", "eval"):
        if prompts := record.prompts_of_both(kind, early, late, _DIFF_PROMPTS):
            return [
                sample
                for prompt in prompts
                for step in (early, late)
                for sample in record.samples_of_prompt(kind, step, prompt)[:1]
            ]
    return []


def _why_none(record: Record, options: argparse.Namespace) -> str:
    rows = record.rollouts()
    if not rows:
        return "the record has no rollout yet."
    numbers = sorted({row.rollout_id for row in rows})
    steps = f"it has steps {numbers[0]} to {numbers[-1]}"
    wanted = {options.step, *(options.diff or ())} - {None}
    if pruned := sorted(row.rollout_id for row in rows if row.pruned and row.rollout_id in wanted):
        return f"the samples of step {pruned[0]} were deleted to save space (--record-max-mib); {steps}."
    if options.diff:
        early = options.diff[0]
        evaluated = sorted({row.rollout_id for row in rows if row.kind == "eval" and not row.pruned})
        shared = (n for n in reversed(numbers) if n != early and record.prompts_of_both("train", early, n, 1))
        if options.eval is None and (step := next(shared, None)) is not None:
            steps = f"step {step} repeats prompts of step {early}: --diff {early} {step}"
        elif len(evaluated) > 1:  # these ask the same questions each time
            named = ", ".join(map(str, evaluated))
            steps = f"evaluations of steps {named} have: --diff {evaluated[0]} {evaluated[-1]}"
        return f"steps {options.diff[0]} and {options.diff[1]} have no prompt in common; {steps}."
    return f"no sample matches; {steps}."


def _parser() -> argparse.ArgumentParser:
    parser = run_parser("samples", __doc__)
    add = parser.add_argument
    add("--step", type=int, help="samples of this step (or of its evaluation, with --eval)")
    add("--eval", nargs="?", const="", metavar="NAME", help="samples of evaluations, or of one dataset")
    add("--outcome", choices=("trained", "filtered", "failed", "evaluated"), help="samples with this outcome")
    add("--contains", metavar="TEXT", help="prompt, response or label contains TEXT, in any case")
    count = between(1, 1e9, int)
    order = parser.add_mutually_exclusive_group()
    order.add_argument("--worst", type=count, metavar="N", help="the N responses with the lowest reward")
    order.add_argument("--best", type=count, metavar="N", help="the N responses with the highest reward")
    compared = "responses to the same prompts in steps A and B"
    order.add_argument("--diff", type=int, nargs=2, metavar=("A", "B"), help=compared)
    add("--limit", type=count, default=10, metavar="N", help="show at most N samples; default: 10")
    add("--full", action="store_true", help="do not shorten long texts")
    add("--json", action="store_true", help="one JSON object per line")
    return parser
