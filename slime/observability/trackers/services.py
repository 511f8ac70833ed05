"""Implements the trackers. Their packages are optional and slow to import, so constructors import them."""

from __future__ import annotations

import contextlib
import html
import json
import os
import re
from collections.abc import Mapping
from typing import Any

from slime.observability.trackers.base import COLUMNS, SampleTable, Service, TrackedRun


class TensorBoard(Service):
    """Writes event files to RUN/tensorboard; a resumed run adds a file. Samples are under "Text"."""

    def __init__(self, run: TrackedRun):
        from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2
        from tensorboard.plugins.text.metadata import create_summary_metadata
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        self._tensor = tensor_pb2.TensorProto
        self._text_metadata = create_summary_metadata
        parts = [run.options.get(name) for name in ("tb_project_name", "tb_experiment_name")]
        self._writer = EventFileWriter(str(run.folder.joinpath("tensorboard", *filter(None, parts))))
        self._time = 0.0

    def scalars(self, values: Mapping[str, float], step_key: str, step: int, time: float) -> None:
        self._time = time
        found = [self._summary.Value(tag=key, simple_value=value) for key, value in values.items()]
        self._add(step, found)

    def table(self, table: SampleTable) -> None:
        lines = [f"|{'|'.join(COLUMNS)}|", "|---" * len(COLUMNS) + "|"]
        lines += [f"|{'|'.join(map(_markdown, row))}|" for row in table.rows]
        tensor = self._tensor(dtype="DT_STRING", string_val=["\n".join(lines).encode()])
        metadata = self._text_metadata(display_name=table.name, description="")
        self._add(table.step, [self._summary.Value(tag=table.name, metadata=metadata, tensor=tensor)])

    def _add(self, step: int, values: list[Any]) -> None:
        event = self._event(wall_time=self._time, step=step, summary=self._summary(value=values))
        self._writer.add_event(event)

    def flush(self) -> None:
        self._writer.flush()

    def finish(self) -> None:
        self._writer.close()


class WandB(Service):
    """Sends to Weights & Biases. The run there has slime's id, so that a resumed run continues it."""

    def __init__(self, run: TrackedRun):
        import wandb

        self._table, self._teardown = wandb.Table, wandb.teardown
        get = run.options.get
        if get("wandb_key") and get("wandb_mode") in (None, "online"):
            wandb.login(key=get("wandb_key"), host=get("wandb_host"))
        name = get("wandb_group")
        if name and get("wandb_random_suffix"):
            name = f"{name}-{run.id}"
        self._samples = self._per_step = 1
        if get("wandb_always_use_train_step"):
            self._samples = run.config["rollout_batch_size"] * run.config["n_samples_per_prompt"]
            self._per_step = run.config["global_batch_size"]
        self._run = wandb.init(
            project=get("wandb_project"),
            entity=get("wandb_team"),
            group=get("wandb_group"),
            name=name or run.name,
            id=get("wandb_run_id") or run.id,
            resume="allow",
            mode=get("wandb_mode"),
            dir=get("wandb_dir") or str(run.folder),
            config=dict(run.config),
            settings=wandb.Settings(console="off", silent=True),
        )
        for axis in ("train", "rollout", "eval", "perf", "passrate", "multi_turn"):
            step_key = "rollout/step" if axis in ("perf", "passrate", "multi_turn") else f"{axis}/step"
            self._run.define_metric(f"{axis}/*", step_metric=step_key)

    def scalars(self, values: Mapping[str, float], step_key: str, step: int, time: float) -> None:
        self._run.log({**values, step_key: self._place(step_key, step)})

    def table(self, table: SampleTable) -> None:
        rows = self._table(columns=list(COLUMNS), data=[list(row) for row in table.rows])
        self._run.log({table.name: rows, table.step_key: self._place(table.step_key, table.step)})

    def _place(self, step_key: str, step: int) -> int:
        """Convert a step for the x-axis; --wandb-always-use-train-step counts rollouts in optimizer steps."""
        return step if step_key == "train/step" else step * self._samples // self._per_step

    def finish(self) -> None:
        self._run.finish()
        self._teardown()  # only then has its own process written everything


class Trackio(Service):
    """Sends to trackio. The run's name there contains slime's id, so that a resumed run continues it."""

    def __init__(self, run: TrackedRun):
        import trackio

        self._trackio = trackio
        self._run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT") or "slime",
            name=f"{run.name}-{run.id}",
            space_id=os.environ.get("TRACKIO_SPACE_ID"),
            config=dict(run.config),
            resume="allow",
            private=True,  # samples of the model are not public
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def scalars(self, values: Mapping[str, float], step_key: str, step: int, time: float) -> None:
        self._run.log({**values, step_key: step}, step=step)

    def table(self, table: SampleTable) -> None:
        rows = [dict(zip(COLUMNS, row, strict=True)) for row in table.rows]
        self._run.log(
            {table.name: self._trackio.Table(data=rows), table.step_key: table.step}, step=table.step
        )

    def finish(self) -> None:
        self._run.finish()


class MLflow(Service):
    """Sends to MLflow. A tag with slime's id finds the run again; samples are JSON tables (artifacts)."""

    def __init__(self, run: TrackedRun):
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._metric = Metric
        uri, files = None, None
        if not os.environ.get("MLFLOW_TRACKING_URI"):
            folder = run.folder.absolute() / "mlflow"
            folder.mkdir(exist_ok=True)
            uri, files = f"sqlite:///{folder}/mlflow.db", (folder / "artifacts").as_uri()
        self._client = MlflowClient(tracking_uri=uri)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "slime"
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else self._client.create_experiment(name, files)
        earlier = self._client.search_runs([experiment], f"tags.slime_run = '{run.id}'")
        if earlier:
            self._run = earlier[0].info.run_id
            self._client.update_run(self._run, status="RUNNING")
        else:
            tags = {"slime_run": run.id}
            self._run = self._client.create_run(experiment, run_name=run.name, tags=tags).info.run_id
            params = [Param(key, str(value)[:500]) for key, value in run.config.items()]
            for start in range(0, len(params), 100):  # the limit of one call
                self._client.log_batch(self._run, params=params[start : start + 100])

    def scalars(self, values: Mapping[str, float], step_key: str, step: int, time: float) -> None:
        allowed = {re.sub(r"[^\w\-./: ]", "_", key): value for key, value in values.items()}
        metrics = [self._metric(key, value, int(time * 1000), step) for key, value in allowed.items()]
        self._client.log_batch(self._run, metrics=metrics)

    def table(self, table: SampleTable) -> None:
        text = json.dumps({"columns": COLUMNS, "data": table.rows}, ensure_ascii=False)
        name = re.sub(r"[^\w\-./]", "_", table.name)
        self._client.log_text(self._run, text, f"{name}/step_{table.step:06d}.json")

    def finish(self) -> None:
        with contextlib.suppress(Exception):  # the metrics are stored already
            self._client.set_terminated(self._run)


def _markdown(value: object) -> str:
    """Escape a table cell, so that a model's text cannot end the cell or become a link or a tag."""
    text = re.sub(r"([\\`*_\[\]#|~])", r"\\\1", html.escape("" if value is None else str(value)))
    return text.replace("\n", "<br>")
