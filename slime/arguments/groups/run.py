"""Flags about the run as a whole: where its settings come from and where its files go."""

from dataclasses import dataclass

from slime.arguments.core.flag import flag


@dataclass
class RunFlags:
    """Run."""

    config: str | None = flag(
        None, "YAML file of flags (keys are flag names); the command line wins", metavar="FILE"
    )
    print_config: bool = flag(False, "print every value and where it came from, then exit")
    run_dir: str | None = flag(
        None,
        "folder for metrics, logs and plots, of this run alone; default runs/<model>-<seed>, or the next "
        "free name",
        metavar="DIR",
    )
    runtime: str = flag(
        "local", "local: child processes on this machine; ray: a Ray cluster", choices=("local", "ray")
    )
    seed: int = flag(1234, "seed of the trainer and of engine sampling", ge=0)
    deterministic_mode: bool = flag(
        False,
        "the same bits in every run: reproducible kernels, requests computed one at a time by the embedded "
        "engine (slow)",
    )
    custom_config_path: str | None = flag(
        None, "YAML of extra values for plug-ins; each key becomes an attribute of args", metavar="FILE"
    )
