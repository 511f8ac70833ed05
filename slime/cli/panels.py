"""The start and end panels of `slime train`: what will run where, and the result."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from slime.arguments import Args, explain_batch
from slime.arguments.groups.objectives import SUPERVISED_LOSSES
from slime.arguments.groups.training import count
from slime.catalog.loss_types import has_rewards, method_of
from slime.observability.terminal.progress import Progress, duration, short
from slime.preflight.step_costs import Model
from slime.preflight.trainer_plan import read_model
from slime.record import RECORD_FILE
from slime.utils.files.run_file import LAST_MODEL, read_run
from slime.utils.files.step_folders import step_folders
from slime.utils.machine.cores import num_cores
from slime.utils.machine.own_command import as_typed
from slime.utils.printable import printable

Rows = list[tuple[str, str]]


def as_panel(title: str, rows: Rows) -> RenderableType:
    """Render rows of names and texts with a frame, for a terminal."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="cyan", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, words in rows:
        grid.add_row(name, Text(printable(words)))
    return Panel(grid, title=Text(printable(title), "bold"), title_align="left", border_style="dim")


def as_lines(title: str, rows: Rows) -> Text:
    """Render rows as plain lines, for a file."""
    lines = [f"  {name:<10} {printable(words)}".replace("\n", "\n" + " " * 13) for name, words in rows]
    return Text("\n".join([printable(title), *lines]))


def start_rows(args: Args, earlier: Progress, cost: Sequence[str]) -> Rows:
    """Return the rows of the start panel.

    `earlier`: progress of earlier starts; `cost`: lines with the expected memory and time.
    """
    model = count_parameters(args)
    size = f" ({short(model)} parameters)" if model else ""
    rows = [("model", f"{args.hf_checkpoint or 'none'}{size}")]
    rows += [("trainer", _trainer(args))] if not args.debug_rollout_only else []
    rows += [("engines", _engines(args))] if not args.debug_train_only else []
    if args.num_rollout == 0:
        rows += [("evaluates", "\n".join(_evaluated(args)))] if args.eval_datasets else []
        cost = [line for line in cost if not line.startswith("a step")]
    else:
        data = [args.prompt_data] if isinstance(args.prompt_data, str) else args.prompt_data or ()
        rows.append(("data", " ".join(data) or "from your data source"))
        if args.use_opd:
            rows.append(("teacher", args.opd_teacher_load or args.rm_url or "from --custom-rm-path"))
        if has_rewards(vars(args)) and args.loss_type not in SUPERVISED_LOSSES:
            rows.append(("reward", args.custom_rm_path or args.rm_type or "from the rollout function"))
        rows += [("each step", explain_batch(args)), ("steps", _steps(args))]
    rows += [("expected", "\n".join(cost))] if cost else []
    left = earlier.seconds_left()
    rows += [("time", f"about {duration(left)}, judging by the last start")] if left else []
    samples = f"samples of at most {args.record_max_mib} MiB ({RECORD_FILE})"
    record = samples if args.record_max_mib else "no samples (--record-max-mib 0)"
    rows.append(("written", f"{args.run_dir}: metrics.jsonl, {record}, logs/"))
    return [*rows, ("saved", _saved(args))] if args.num_rollout != 0 else rows


def closing_rows(args: Args, progress: Progress, seconds: float, error: BaseException | None) -> Rows:
    """Return the rows of the end panel: curves, where the model is, and what to do next."""
    rows = [("steps", f"{progress.done} of {progress.total or '?'} in {duration(seconds)}")]
    curves = {progress.main.title: progress.values, **progress.evals}
    for name, values in curves.items():
        if values:
            listed = list(values.values())
            best = min(listed) if progress.main.falls and name == progress.main.title else max(listed)
            first, last = listed[0], listed[-1]
            rows.append((name, f"{first:.4g} at the start, {last:.4g} at the end, best {best:.4g}"))
    checkpoints = step_folders(args.save) if args.save is not None else {}
    rows.append(("model", _where_is_the_model(args, progress, checkpoints, since=time.time() - seconds)))
    rows = rows if args.num_rollout != 0 else []  # of an evaluation, the table that follows has the scores
    record = read_run(Path(args.run_dir))
    rows += [("restarts", record.last.restarts_text)] if record is not None and record.last.restarts else []
    run = args.run_dir
    worst = ("--worst", 5) if has_rewards(vars(args)) else ()
    follow = [as_typed("dashboard", run), as_typed("samples", run, *worst), as_typed("plot", run)]
    if error is not None and checkpoints and args.load == args.save:
        follow.insert(0, "run the same command to resume from the last checkpoint")
    rows.append(("next", "\n".join([*follow, f"logs: {args.run_dir}/logs"])))
    return rows


def verdict(args: Args, progress: Progress, seconds: float) -> str:
    """Return the last line of a run that has finished: what it reached, and where its model is."""
    values = list(progress.values.values())
    change = f"{progress.main.title} {values[0]:.4g} -> {values[-1]:.4g}, " if values else ""
    saved = (
        f"; the model is in {os.path.relpath(args.run_dir)}/{LAST_MODEL}"
        if Path(args.run_dir, LAST_MODEL).is_dir()
        else ""
    )
    return f"finished: {change}{count(progress.done, 'step')} in {duration(seconds)}{saved}"


def count_parameters(args: Args) -> float | None:
    """Return the number of parameters, from config.json; None: not known."""
    if args.hf_checkpoint is None or not Path(args.hf_checkpoint).is_dir():
        return None
    try:
        return Model(read_model(args.hf_checkpoint)).parameters
    except (ValueError, KeyError, TypeError, OSError):  # an unknown architecture
        return None


def _trainer(args: Args) -> str:
    nodes, each = args.actor_num_nodes, args.actor_num_gpus_per_node
    ranks = f"{nodes * each} rank{'s' if nodes * each > 1 else ''}"
    machines = f" on {nodes} machines" if nodes > 1 else ""
    rate = f"lr {args.lr:g}" + (f", LoRA adapters of rank {args.lora_rank}" if args.lora_rank else "")
    what = f"{args.dtype}, {method_of(vars(args))}, {rate}"
    return f"{ranks} of {args.train_backend}{machines} ({_device()}), {what}"


def _engines(args: Args) -> str:
    if args.rollout_external_engine_addrs:
        return f"{len(args.rollout_external_engine_addrs)} external"
    count = sum(model.num_engines for model in args.engine_topology.models)
    gpus = f" on {args.rollout_num_gpus} GPUs" if _num_gpus() else f" ({_device()})"
    shared = ", sharing GPUs with the trainer" if args.colocate else ""
    longest = f", responses up to {args.rollout_max_response_len} tokens"
    return f"{count} x {args.rollout_engine}{gpus}{shared}{longest}"


def _evaluated(args: Args) -> Iterator[str]:
    """Yield a line for each dataset: its rows, how responses are sampled, and what scores them."""
    for one in args.eval_datasets:
        temperature = args.rollout_temperature if one.temperature is None else one.temperature
        how = f"at temperature {temperature:g}" if temperature else "greedy"
        reward = one.custom_rm_path or one.rm_type or args.custom_rm_path or args.rm_type
        each = count(one.n_samples_per_eval_prompt or 1, "response")
        yield f"{one.name}: {one.path}, {each} per prompt, {how}; reward {reward or 'of the rows'}"


def _device() -> str:
    return f"{_num_gpus()} GPUs here" if _num_gpus() else f"CPU, {num_cores()} cores"


def _num_gpus() -> int:
    from slime.utils.machine.accelerator import device_count  # imported here: it loads torch

    return device_count()


def _steps(args: Args) -> str:
    steps = f"{args.num_rollout}" if args.num_rollout is not None else count(args.num_epoch or 1, "epoch")
    names = ", ".join(dataset.name for dataset in args.eval_datasets)
    every = f"; {names} evaluated every {args.eval_interval}" if names and args.eval_interval else ""
    return steps + every


def _saved(args: Args) -> str:
    if args.debug_rollout_only:
        return "nothing is trained"
    if args.save is None and args.save_hf is None:
        return "nothing: the trained weights are lost at the end (--save DIR, --save-hf DIR)"
    passes = f"every {args.save_interval} steps, after each pass over the data and "
    when = f"{passes if args.save_interval else ''}at the end"
    if args.save is None:
        return f"the model in {args.save_hf} {when}; no checkpoints to resume from (--save DIR)"
    model = f"the model in {args.save_hf}" if args.save_hf else "no model folder (--save-hf DIR)"
    return f"checkpoints in {args.save} {when}; {model}"


def _where_is_the_model(args: Args, progress: Progress, checkpoints: dict[int, Path], since: float) -> str:
    """Return where the trained model is; files older than `since` belong to an earlier start."""
    for step in range(progress.done, -1, -1) if args.save_hf else ():
        config = Path(str(args.save_hf).format(rollout_id=step)) / "config.json"
        if config.is_file() and config.stat().st_mtime >= since:
            link = Path(args.run_dir) / LAST_MODEL
            is_last = link.is_symlink() and link.resolve() == config.parent.resolve()
            return f"{config.parent} (also {link})" if is_last else str(config.parent)
    if checkpoints:
        return f"{checkpoints[max(checkpoints)]} ({as_typed('convert')} makes a model folder of it)"
    return "not saved" + ("" if args.save else ": neither --save nor --save-hf was given")
