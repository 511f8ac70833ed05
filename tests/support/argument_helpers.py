"""The smallest complete command line, for tests that change one thing about it."""

from slime.arguments import Args, PluginArgs, default_args, parse_args

# Sizes are explicit, so that no test depends on the machine it runs on.
BASE = {
    "hf_checkpoint": "owner/model",
    "rollout_batch_size": 4,
    "n_samples_per_prompt": 2,
    "num_rollout": 3,
    "rollout_max_response_len": 16,
    "rollout_global_dataset": False,
    "actor_num_gpus_per_node": 1,
    "rollout_num_gpus": 1,
    "num_gpus_per_node": 2,
    "distributed_backend": "gloo",
}


def base_argv(**changes: object) -> list[str]:
    """The words of the base command line; a change to None leaves that flag out."""
    words = []
    for name, value in (BASE | changes).items():
        if name == "rollout_global_dataset":
            words += [] if value else ["--disable-rollout-global-dataset"]
        elif isinstance(value, bool):
            words += ["--" + ("" if value else "no-") + name.replace("_", "-")]
        elif isinstance(value, (list, tuple)):
            words += ["--" + name.replace("_", "-"), *map(str, value)]
        elif value is not None:
            words += ["--" + name.replace("_", "-"), str(value)]
    return words


def parse(*words: str, **changes: object) -> Args:
    return parse_args([*base_argv(**changes), *words])


def declared(**changes: object) -> PluginArgs:
    """What a plug-in gets, with every flag at its declared default but for the changes."""
    return PluginArgs(**(vars(default_args()) | changes))
