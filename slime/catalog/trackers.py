"""Trackers: services that show curves and samples of runs; each is enabled by its flag `--use-NAME`."""

from dataclasses import dataclass

from slime.catalog.limits import limit

_SERVICES = "slime.observability.trackers.services"
FEED = "slime.observability.trackers.feed.Feed"  # starts the process of a tracker


@dataclass(frozen=True, slots=True)
class TrackerRow:
    """One tracker. `service`: a `Service` of `observability/trackers/base.py`, in its own process."""

    service: str
    title: str
    package: str  # that has to be installed
    extra: str  # the extra of slime-rl that installs it
    help: str
    options: tuple[str, ...] = ()  # flags that the service reads


TRACKERS: dict[str, TrackerRow] = {
    "tensorboard": TrackerRow(
        f"{_SERVICES}.TensorBoard",
        "TensorBoard",
        "tensorboard",
        "tensorboard",
        "event files in RUN/tensorboard; `tensorboard --logdir RUN/tensorboard`",
        ("tb_project_name", "tb_experiment_name"),
    ),
    "wandb": TrackerRow(
        f"{_SERVICES}.WandB",
        "Weights & Biases",
        "wandb",
        "wandb",
        "an account at wandb.ai or your own server; `--wandb-mode offline` needs neither",
        (
            *("wandb_mode", "wandb_dir", "wandb_key", "wandb_host", "wandb_team", "wandb_group"),
            *("wandb_project", "wandb_run_id", "wandb_random_suffix"),
            "wandb_always_use_train_step",
        ),
    ),
    "trackio": TrackerRow(
        f"{_SERVICES}.Trackio",
        "trackio",
        "trackio",
        "trackio",
        "a local database of all runs, or a Hugging Face Space; `trackio show` opens its dashboard",
    ),
    "mlflow": TrackerRow(
        f"{_SERVICES}.MLflow",
        "MLflow",
        "mlflow",
        "mlflow",
        "an MLflow server, or a database in RUN/mlflow",
    ),
}


def chosen_trackers(args: object) -> list[str]:
    """Return the names of the trackers that the flags enable."""
    return [name for name in TRACKERS if getattr(args, f"use_{name}", False)]


def tracker_options(args: object) -> dict[str, object]:
    """Return the values of the flags of trackers."""
    names = [name for row in TRACKERS.values() for name in row.options]
    samples = limit(args, "tracker-samples") if hasattr(args, "limits") else 0  # else a plug-in built `args`
    return {"tracker_samples": samples, **{name: getattr(args, name, None) for name in names}}


def missing_package(name: str) -> str:
    """Return the error for a tracker whose package is not installed."""
    row = TRACKERS[name]
    return f"--use-{name} needs the package {row.package}: pip install 'slime-rl[{row.extra}]'"
