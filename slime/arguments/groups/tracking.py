"""Flags of metrics: which trackers receive them and which extra ones are computed."""

from dataclasses import dataclass

from slime.arguments.core.flag import flag, needs

# -- when flags have an effect
TENSORBOARD = needs("use_tensorboard", harmless=True)
WANDB = needs("use_wandb", harmless=True)


@dataclass
class TrackingFlags:
    """Logging (metrics.jsonl is always written)."""

    record_max_mib: int = flag(
        1024,
        "MiB of samples kept for `slime samples RUN`; the oldest are removed first. 0: none",
        ge=0,
    )
    record_dir: str | None = flag(
        None,
        "local folder for the record, copied to RUN; default: RUN, or /tmp where RUN is on a network",
        metavar="DIR",
    )
    dashboard: bool = flag(False, "serve the dashboard while the run is active; later: `slime dashboard RUN`")
    use_tensorboard: bool = flag(False, "TensorBoard events, in RUN/tensorboard")
    tb_project_name: str | None = flag(None, "TensorBoard project", metavar="NAME", only_with=TENSORBOARD)
    tb_experiment_name: str | None = flag(
        None, "TensorBoard experiment", metavar="NAME", only_with=TENSORBOARD
    )
    use_wandb: bool = flag(False, "metrics and samples to Weights & Biases")
    wandb_mode: str | None = flag(
        None, "W&B mode", choices=("online", "offline", "disabled"), only_with=WANDB
    )
    wandb_dir: str | None = flag(None, "W&B folder", only_with=WANDB)
    wandb_key: str | None = flag(None, "W&B key; better: `wandb login`", secret=True, only_with=WANDB)
    wandb_host: str | None = flag(None, "W&B server", metavar="URL", only_with=WANDB)
    wandb_team: str | None = flag(None, "W&B team", metavar="NAME", only_with=WANDB)
    wandb_group: str | None = flag(None, "W&B group", metavar="NAME", only_with=WANDB)
    wandb_project: str | None = flag(None, "W&B project", metavar="NAME", only_with=WANDB)
    wandb_run_id: str | None = flag(
        None, "W&B run to continue; default: this one's", metavar="ID", only_with=WANDB
    )
    wandb_random_suffix: bool = flag(
        True, "no random suffix on the W&B group", off="--disable-wandb-random-suffix", only_with=WANDB
    )
    wandb_always_use_train_step: bool = flag(
        False, "rollouts and evaluations on W&B by the optimizer steps before them", only_with=WANDB
    )
    use_trackio: bool = flag(False, "metrics and samples to trackio (environment: TRACKIO_SPACE_ID)")
    use_mlflow: bool = flag(False, "metrics and samples to MLflow (environment: MLFLOW_TRACKING_URI)")
    log_passrate: bool = flag(False, "pass@k")
    log_correct_samples: bool = flag(False, "lengths and entropy of responses with reward 1")
    log_multi_turn: bool = flag(False, "lengths and turns of whole responses (multi_turn/*)")
    log_reward_category: str | None = flag(None, "count rewards by this entry of a dict", metavar="KEY")
