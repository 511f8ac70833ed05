"""`slime.train`, `slime.sft`, `slime.evaluate`, ...: runs from Python, with functions and rows for files.

The arguments are written to `RUN/inputs` (rows, functions, `run.yaml`) and read as the command reads them:
`slime train --config RUN/inputs/run.yaml` with its own --run-dir and --save repeats the run.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from slime.arguments import Args
from slime.arguments.core.draft import ASYNCHRONOUS, PRESET, SYNCHRONOUS, Draft
from slime.arguments.groups.run import base_folder
from slime.arguments.parser import Preset, parse_args
from slime.catalog.loss_types import curves_of
from slime.catalog.rewards import BOXED, REWARDS
from slime.cli import train as synchronous
from slime.cli import train_async as asynchronous
from slime.cli.notebook import in_notebook
from slime.cli.tasks import TASKS, model_folder
from slime.data.copies import forget_copies
from slime.observability.tracking import read_metrics
from slime.record import RecordedSample, Select, open_record
from slime.utils.errors import FolderInUse
from slime.utils.files.folder_lock import lock_file
from slime.utils.files.run_file import CLAIM, LAST_MODEL, claim_run_folder, is_used, read_run, resumption_of
from slime.utils.misc import load_function, plugin_module_name

Rows = str | Path | Iterable[Any]


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a run. `model_path`: the trained model as a Hugging Face folder; None: not saved."""

    run_dir: Path
    model_path: Path | None
    metrics: list[dict[str, Any]] = field(repr=False)  # every line of metrics.jsonl

    def curve(self, name: str | None = None) -> dict[int, float]:
        """Return one metric by step; without a name the reward, or the loss of a run without rewards."""
        if name is None:
            run = read_run(self.run_dir)
            name = curves_of(run.last.values if run is not None else {})[0].metric
        return {row["step"]: row[name] for row in self.metrics if name in row}

    def samples(self, **select: Any) -> list[RecordedSample]:
        """Return responses of the model, newest first; arguments are those of `slime.record.Select`."""
        with open_record(self.run_dir) as record:
            return record.samples(Select(**select))


def train(
    model: str | Path,
    reward: Callable[..., Any] | str | None = None,
    data: Rows | None = None,
    *,
    generate: Callable[..., Any] | str | None = None,
    eval_data: Rows | None = None,
    loop_async: bool = False,
    **flags: Any,
) -> Result:
    """Train `model` and return the result; every flag of `slime train` can be given by its name.

    `reward`: a function (of a sample, or in TRL's signature), the name of a built-in reward, or an import
    path. `data`: rows (dicts, or texts that are prompts), or what --prompt-data takes. A flag that takes
    the path of a function also takes the function. Checkpoints and the model go to the run's folder
    unless `save` says otherwise; `save=None` keeps none. Mistakes are ValueErrors that name the flag; an
    interrupt ends every process of the run and is then raised.
    """
    model = _fresh(model)
    with _run_folder(base_folder(model, flags.get("seed", 1234)), flags) as folder:
        settings = {
            "hf_checkpoint": model,
            "run_dir": str(folder),
            **_saving(folder, flags),
            **_reward(reward),
        }
        if generate is not None:
            settings["custom_generate_function_path"] = generate

        def write_rows(inputs: Path) -> dict[str, Any]:
            found = _prompts(data, inputs / "prompts.jsonl", flags)
            if eval_data is not None:
                found["eval_prompt_data"] = ["eval", _written(eval_data, inputs / "eval.jsonl")[0]]
            return found

        return _train(folder, settings, write_rows, flags, loop_async=loop_async)


def sft(model: str | Path, data: Rows, *, out: str | Path | None = None, **flags: Any) -> Result:
    """Fine-tune `model` on conversations, or on prompts and completions, as `slime sft` does.

    `data`: rows, or what --data takes. `out`: the folder of the run. Any flag of `slime train` can be given.
    """
    return _run_task("sft", model, data, out, flags)


def dpo(model: str | Path, data: Rows, *, out: str | Path | None = None, **flags: Any) -> Result:
    """Train `model` on rows with a chosen and a rejected response, as `slime dpo` does."""
    return _run_task("dpo", model, data, out, flags)


def reward_model(model: str | Path, data: Rows, *, out: str | Path | None = None, **flags: Any) -> Result:
    """Train a reward model on rows with a chosen and a rejected response, as `slime reward-model` does."""
    return _run_task("reward-model", model, data, out, flags)


def distill(
    model: str | Path,
    data: Rows,
    teacher: str | Path | None = None,
    *,
    out: str | Path | None = None,
    **flags: Any,
) -> Result:
    """Train `model` on its own responses to imitate `teacher`, as `slime distill` does."""
    given = {} if teacher is None else {"opd_teacher_load": model_folder(str(teacher))}
    return _run_task("distill", model, data, out, {**given, **flags})


def evaluate(
    model: str | Path,
    data: Rows | Mapping[str, Rows],
    reward: Callable[..., Any] | str | None = None,
    *,
    out: str | Path | None = None,
    **flags: Any,
) -> Result:
    """Evaluate `model` without training it, as `slime eval` does.

    `data`: rows or a file, or several of them by name. `result.curve("eval/NAME")` is the score, and the last
    lines of `result.metrics` have all numbers; rows without a name are the data set "eval".
    """
    return _run_task("eval", model, data, out, {**_reward(reward), **flags})


def _run_task(
    command: str,
    model: str | Path,
    data: Rows | Mapping[str, Rows],
    out: str | Path | None,
    flags: dict[str, Any],
) -> Result:
    """Run one of the commands of `TASKS` on rows or files."""
    model = _fresh(model_folder(str(model)))
    if out is not None:
        flags = {"run_dir": out, **flags}
    with _run_folder(f"runs/{Path(model).name}-{command}", flags) as folder:

        def write_rows(inputs: Path) -> dict[str, Any]:
            if command != "eval":
                return {"prompt_data": _written(data, inputs / "data.jsonl")[0]}
            named = data if isinstance(data, Mapping) else {"eval": data}
            sources = {name: _written(rows, inputs / f"{name}.jsonl")[0] for name, rows in named.items()}
            return {"eval_prompt_data": [word for pair in sources.items() for word in pair]}

        def preset(draft: Draft) -> dict[str, Any]:
            # `save=None` keeps no checkpoints.
            return {k: v for k, v in TASKS[command].preset(draft).items() if flags.get(k, v) is not None}

        settings = {"hf_checkpoint": model, "run_dir": str(folder)}
        return _train(folder, settings, write_rows, flags, preset=preset)


def _fresh(model: str | Path) -> str:
    """Forget what an earlier run of this process has read; return the model with its whole path."""
    forget_copies()
    load_function.cache_clear()
    return str(Path(model).absolute() if Path(model).is_dir() else model)


def _train(
    folder: Path,
    settings: dict[str, Any],
    write_rows: Callable[[Path], dict[str, Any]],
    flags: Mapping[str, Any],
    *,
    loop_async: bool = False,
    preset: Preset | None = None,
) -> Result:
    """Write the inputs of a run to its folder, and run it. `write_rows` returns the flags of its data."""
    held = set(folder.iterdir()) if folder.exists() else set()
    fresh, inputs = held <= {lock_file(folder, CLAIM)}, folder / "inputs"
    inputs.mkdir(parents=True, exist_ok=True)
    try:
        settings |= write_rows(inputs)
        both = sorted(
            settings.keys() & flags.keys() - {"run_dir", "save", "save_hf", "input_key", "label_key"}
        )
        if both:
            raise ValueError(f"{both[0]} is given twice: by its own name and by another argument.")
        settings |= flags
        values = {name: _value(name, value, inputs, settings) for name, value in settings.items()}
        file = inputs / "run.yaml"
        _write_yaml(file, values)
        kind = ASYNCHRONOUS if loop_async else SYNCHRONOUS
        args = parse_args(["--config", str(file)], training_loop=kind, preset=preset)
        presets = {n: getattr(args, n) for n, source in args.sources.items() if source == PRESET}
        _write_yaml(file, presets | values)
    except BaseException:
        if fresh:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    is_watched = sys.stdout is not None and sys.stdout.isatty()  # a file gets plain log lines
    with synchronous.shown(args, screen=is_watched or in_notebook()):
        (asynchronous if loop_async else synchronous).run_loop(args)
    return Result(folder, _model_path(args), read_metrics(folder))


def _write_yaml(file: Path, values: Mapping[str, Any]) -> None:
    file.write_text(yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True), encoding="utf-8")


@contextlib.contextmanager
def _run_folder(base: str, flags: Mapping[str, Any]) -> Iterator[Path]:
    """Yield the folder of the run; one that is chosen here is locked until the run has claimed it."""
    resumption = resumption_of(flags.get("load"), flags.get("ckpt_step"), bool(flags.get("finetune")))
    if flags.get("run_dir") is None:
        with claim_run_folder(base, resumption) as name:
            yield Path(name).absolute()
        return
    folder = Path(flags["run_dir"]).expanduser().absolute()
    if is_used(folder) and resumption is None:  # before anything of that run is written over
        raise FolderInUse(
            f"run_dir {folder} belongs to another run: give another folder, or resume that run with load=."
        )
    yield folder


def _saving(folder: Path, flags: Mapping[str, Any]) -> dict[str, Any]:
    if "save" in flags and flags["save"] is None:
        return {}
    return {"save": str(folder / "checkpoints"), "save_hf": str(folder / "model-{rollout_id}")}


def _reward(reward: Callable[..., Any] | str | None) -> dict[str, Any]:
    if reward is None:
        return {}
    built_in = isinstance(reward, str) and reward.removeprefix(BOXED) in REWARDS
    return {"rm_type" if built_in else "custom_rm_path": reward}


def _prompts(data: Rows | None, path: Path, flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the file of the rows, and their columns if they have the usual names."""
    if data is None:
        return {}
    source, columns = _written(data, path)
    found: dict[str, Any] = {"prompt_data": source}
    if "prompt" in columns and "input" not in columns and "prompt_template" not in flags:
        found["input_key"] = "prompt"
    if "label" in columns:
        found["label_key"] = "label"
    return found


def _written(data: Rows, path: Path) -> tuple[str, set[str]]:
    """Write rows to a file and return its path and common columns; a given path is returned unchanged."""
    if isinstance(data, (str, Path)):
        return str(data), set()
    # A table of pandas has rows only when asked.
    rows: Any = data.to_dict("records") if hasattr(data, "to_dict") and hasattr(data, "columns") else data
    if isinstance(rows, Mapping):
        raise ValueError(
            "data is a mapping; give a list of rows, each a dict: [{'prompt': ..., 'label': ...}]."
        )
    columns: set[str] | None = None
    with path.open("w", encoding="utf-8") as file:
        for number, row in enumerate(rows, start=1):
            row = {"input": row} if isinstance(row, str) else row
            try:
                file.write(json.dumps(dict(row), ensure_ascii=False) + "\n")
            except (TypeError, ValueError) as error:
                raise ValueError(
                    f"row {number} of data cannot be written as JSON ({error}): {row!r:.200}"
                ) from None
            columns = set(row) if columns is None else columns & set(row)
    if columns is None:
        raise ValueError("data has no rows.")
    return str(path), columns


def _value(name: str, value: Any, inputs: Path, settings: Mapping[str, Any]) -> Any:
    """Return a setting for YAML; a function becomes the path of a file that every process can load."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, (list, tuple)):
        return [_value(name, item, inputs, settings) for item in value]
    if callable(value):
        elsewhere = settings.get("runtime") == "ray" or settings.get("rollout_workers", 1) != 1
        return _path_of(name, value, inputs, needs_pickle=elsewhere)
    return value.item() if hasattr(value, "item") and hasattr(value, "dtype") else value


def _path_of(name: str, function: Callable[..., Any], inputs: Path, *, needs_pickle: bool) -> str:
    """Return the import path of a function; one from a notebook or a script is pickled by value.

    This process, which calls the rewards and generate functions of a local run, uses the function itself.
    """
    module, attribute = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    home = sys.modules.get(module) if module and module != "__main__" else None
    if home is not None and getattr(home, attribute, None) is function and hasattr(home, "__file__"):
        return f"{module}.{attribute}"
    stem = name.removesuffix("_path").removesuffix("_function").removeprefix("custom_")
    file = inputs / f"{stem}.py"
    file.write_text(_stub(stem, function, file.with_suffix(".pkl"), needs_pickle), encoding="utf-8")
    loaded = types.ModuleType(plugin_module_name(file))
    loaded.__file__ = str(file)
    setattr(loaded, stem, function)
    sys.modules[loaded.__name__] = loaded
    return f"{file}:{stem}"


def _stub(stem: str, function: Callable[..., Any], pickle: Path, needs_pickle: bool) -> str:
    import cloudpickle  # here: the command needs none of it

    try:
        content = cloudpickle.dumps(function)
    except Exception as error:  # an object that holds a lock, a connection, ...: whatever it raises
        reason = f"{stem} ({function!r}) cannot be sent to other processes: {type(error).__name__}: {error}"
        if needs_pickle:
            raise ValueError(
                f"{reason}. Define it in a module and give its import path, or open what it holds inside it."
            ) from error
        return f'"""Lives only in the process that made it."""\n\nraise RuntimeError({reason!r})\n'
    pickle.write_bytes(content)
    return (
        f'"""`{stem}` as it was given to slime.train."""\n\n'
        "import pathlib\n\nimport cloudpickle\n\n"
        f'{stem} = cloudpickle.loads(pathlib.Path(__file__).with_suffix(".pkl").read_bytes())\n'
    )


def _model_path(args: Args) -> Path | None:
    path = Path(args.run_dir) / LAST_MODEL
    return path.resolve() if args.save_hf is not None and (path / "config.json").is_file() else None
