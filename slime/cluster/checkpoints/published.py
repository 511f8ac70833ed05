"""Publishes the Hugging Face folders of a run: writes model cards, and uploads to the hub on request."""

from __future__ import annotations

import concurrent.futures
import logging
import os
from pathlib import Path
from typing import Any

import yaml

from slime.arguments import Args
from slime.arguments.core.draft import DEFAULT
from slime.catalog.datasets import HUB, hub_parts
from slime.catalog.loss_types import curves_of, method_of
from slime.catalog.metrics import is_eval_score
from slime.observability.tracking import read_metrics
from slime.utils.async_utils import in_background
from slime.utils.files.run_file import LAST_MODEL, name_of_run, read_run

logger = logging.getLogger(__name__)

CARD = "README.md"
_ROWS = 20  # of the curve
_PUSH_DEADLINE_S = 3600.0


class Models:
    """Publishes the models of one run. Failures never end the run: they are logged, and the folder stays."""

    def __init__(self, args: Args, run_dir: Path):
        self._args, self._run_dir = args, run_dir
        self._push: concurrent.futures.Future[None] | None = None  # of the last model

    def made(self, folder: Path, rollout_id: int) -> None:
        """Give the model in `folder` its card, make RUN/model a link to it, and upload it where asked."""
        self.describe(folder, rollout_id)
        self.link(folder)
        self.push(folder, rollout_id)

    def describe(self, folder: Path, rollout_id: int) -> None:
        """Write the model card."""
        try:
            (folder / CARD).write_text(model_card(self._args, self._run_dir, rollout_id), encoding="utf-8")
        except (OSError, ValueError) as error:
            logger.warning("The model card of %s was not written: %s", folder, error)

    def link(self, folder: Path) -> None:
        """Make RUN/model point at the last model, so that the next command needs no number."""
        link = self._run_dir / LAST_MODEL
        if link.resolve() == folder.resolve():
            return
        if link.exists() and not link.is_symlink():
            logger.warning(
                "%s is not a link of this run, so it was not changed; the last model is in %s", link, folder
            )
            return
        inside = folder.resolve().is_relative_to(self._run_dir.resolve())  # such a link survives a move
        target = os.path.relpath(folder.resolve(), self._run_dir.resolve()) if inside else folder.resolve()
        temporary = link.with_name(f".{LAST_MODEL}.tmp")
        try:
            temporary.unlink(missing_ok=True)
            temporary.symlink_to(target)
            temporary.replace(link)
        except OSError as error:
            logger.warning("The link %s to %s was not created: %s", link, folder, error)

    def push(self, folder: Path, rollout_id: int) -> None:
        """Start an upload to the hub if --push-to-hub is set; training continues meanwhile."""
        if self._args.push_to_hub is not None:
            before = self._push
            self._push = in_background(lambda: self._upload(folder, rollout_id, before), "push-to-hub")

    def finish(self) -> None:
        """Wait until the last model is on the hub; a failure is logged."""
        if self._push is not None:
            _, running = concurrent.futures.wait([self._push], _PUSH_DEADLINE_S)
            if running:
                logger.warning("--push-to-hub took more than %.0f s and is abandoned", _PUSH_DEADLINE_S)

    def _upload(self, folder: Path, rollout_id: int, before: concurrent.futures.Future[None] | None) -> None:
        if before is not None:
            before.result()
        repository = self._args.push_to_hub
        try:
            _upload(self._args, folder, rollout_id)
            logger.info("Uploaded %s to the hub as %s.", folder, repository)
        except Exception as error:  # of the network, the hub, the disk: the run has its model all the same
            said = str(error).strip().partition("\n")[0][:300]
            logger.warning(
                "--push-to-hub %s failed (%s: %s); the model is in %s. To upload it: hf upload %s %s",
                *(repository, type(error).__name__, said, folder, repository, folder),
            )


def _upload(args: Args, folder: Path, rollout_id: int) -> None:
    import huggingface_hub  # heavy, and most runs push nothing

    assert args.push_to_hub is not None, "asked by the caller"
    api = huggingface_hub.HfApi()
    api.create_repo(args.push_to_hub, private=True, exist_ok=True)
    message = f"slime: after rollout {rollout_id}"
    api.upload_folder(repo_id=args.push_to_hub, folder_path=folder, commit_message=message)


def model_card(args: Args, run_dir: Path, rollout_id: int) -> str:
    """Return the model card: the model, its training settings, and the metrics of the run."""
    record = read_run(run_dir)
    sources = [args.prompt_data] if isinstance(args.prompt_data, str) else args.prompt_data or []
    base, name = str(args.hf_checkpoint), args.push_to_hub or name_of_run(run_dir)
    facts: dict[str, Any] = {"library_name": "transformers", "tags": ["slime", method_of(vars(args))]}
    if not Path(base).exists():
        facts["base_model"] = base
    named = [hub_parts(source.partition("@[")[0])[0] for source in sources if source.startswith(HUB)]
    named = [source for source in named if not Path(source).exists()]
    if named:
        facts["datasets"] = named
    values = args.to_dict(hide_secrets=True)
    given = {key: values[key] for key in sorted(values) if args.sources.get(key, DEFAULT) != DEFAULT}
    versions = record.last.versions if record is not None else {}
    curves = [*(curve.metric for curve in curves_of(values)), "rollout/response_len/mean"]
    head, *curve = _curve(run_dir, rollout_id, curves)
    return "\n".join(
        [
            "---",
            yaml.safe_dump(facts, sort_keys=False).strip(),
            "---",
            f"# {name}",
            "",
            f"{_short(base)}, trained with slime ({method_of(values)}, {rollout_id + 1} rollouts).",
            "",
            *_section("Curve", head, curve),
            *_section(
                "Settings", ("flag", "value"), [(f"`{k}`", f"`{_short(v)}`") for k, v in given.items()]
            ),
            *_section("Data", ("prompts",), [(f"`{_short(source)}`",) for source in sources]),
            *_section("Versions", ("package", "version"), list(versions.items())),
        ]
    )


def _section(title: str, head: tuple[str, ...], rows: list[tuple[Any, ...]]) -> list[str]:
    if not rows:
        return []
    table = [head, ("---",) * len(head), *rows]
    lines = ["| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in table]
    return [f"## {title}", "", *lines, ""]


def _curve(run_dir: Path, last: int, curves: list[str]) -> list[tuple[Any, ...]]:
    """Return the head of the curve's table, then at most `_ROWS` steps, evenly spread, and the last one."""
    by_step: dict[int, dict[str, Any]] = {}
    for row in read_metrics(run_dir):
        if row["step"] <= last:
            by_step.setdefault(row["step"], {}).update(row)
    logged = {name for row in by_step.values() for name in row}
    names = [name for name in (*curves, *sorted(filter(is_eval_score, logged))) if name in logged]
    steps = [step for step in sorted(by_step) if any(name in by_step[step] for name in names)]
    every = max(1, -(-len(steps) // _ROWS))
    rows: list[tuple[Any, ...]] = [("step", *names)]
    for step in sorted({*steps[::every], *steps[-1:]}):
        values = (by_step[step].get(name) for name in names)
        rows.append((step, *("" if value is None else f"{value:.4g}" for value in values)))
    return rows


def _short(value: Any) -> str:
    """A value for everybody's eyes: of a path on this machine only the name, on one line."""
    text = str(value)
    text = Path(text).name if text.startswith(("/", "~")) else text
    return " ".join(text.replace("`", "'").split())[:200]
