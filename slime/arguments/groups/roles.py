"""Reads --megatron-config-path: separate settings of policy and critic, by names of flags.

    megatron:
      - {role: actor, overrides: {lr: 1e-6}}
      - {role: critic, overrides: {lr: 1e-5, hf_checkpoint: models/small, load: models/small_torch_dist}}

Settings of the actor act like flags. The critic is a separate model on the same processes: its weights, size,
optimizer and schedule may differ; layout and batches are the policy's.
"""

from typing import Any

from slime.arguments.core.draft import Draft, Refused
from slime.arguments.core.files import read_yaml_mapping
from slime.arguments.core.flag import name_of
from slime.arguments.groups.objectives import CRITIC
from slime.utils.files.torch_dist_folder import is_megatron_folder

FLAG = "--megatron-config-path"
ROLES = ("actor", "critic")
# Settings of the critic that also have a flag.
CRITIC_FLAGS = {**{name: f"critic_{name}" for name in ("lr", "lr_warmup_iters")}, "load": "critic_load"}
# Settings that the critic's model and optimizer read from its copy of the arguments.
OWN = (
    *("hf_checkpoint", "megatron_config", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps"),
    *("lr_decay_iters", "lr_decay_style", "min_lr", "clip_grad", "recompute_granularity"),
)
_IDLE = ("num_nodes", "num_gpus_per_node")  # where the critic runs: on the policy's processes


def read_roles(path: str) -> dict[str, dict[str, Any]]:
    """Return role -> its settings as written; ValueError for an invalid file."""
    content = read_yaml_mapping(path, FLAG)
    rows = content.get("megatron")
    if set(content) != {"megatron"} or not isinstance(rows, list):
        raise ValueError(f"{FLAG} {path}: write `megatron:` and a list of roles under it, and nothing else.")
    found: dict[str, dict[str, Any]] = {}
    for i, row in enumerate(rows):
        where = f"{FLAG} {path}: megatron[{i}]"
        if not isinstance(row, dict) or not set(row) <= {"name", "role", "overrides", "args"}:
            raise ValueError(f"{where} is {row!r}: it may have name, role and overrides.")
        role, settings = row.get("role"), row.get("overrides", row.get("args")) or {}
        if role not in ROLES or role in found:
            second = f": a second {role}" if role in found else ""
            raise ValueError(f"{where}: role is {role!r}; there are {' and '.join(ROLES)}{second}.")
        if not isinstance(settings, dict):
            raise ValueError(f"{where}: overrides are {settings!r}; write `flag: value` lines.")
        found[role] = {name_of(str(key)): value for key, value in settings.items()}
    return found


def apply_critic(draft: Draft, critic: Draft, path: str) -> None:
    """Lay the settings of the critic, read into a draft of their own, over those of the run."""
    if not CRITIC.works(draft):
        raise ValueError(f"{FLAG} {path} has settings of a critic, which is trained only {CRITIC.words}.")
    own: dict[str, Any] = {}
    for name in (name for name in critic.values if critic.was_given(name)):
        value = critic.values[name]
        if name in CRITIC_FLAGS and not (name == "load" and not is_megatron_folder(value)):
            draft.set(CRITIC_FLAGS[name], value, f"file {path}")
        elif name == "load" or (name == "hf_checkpoint" and not critic.was_given("load")):
            draft.set("critic_load", value, f"file {path}")
        else:
            own[name] = value
    draft.set("critic_overrides", own, f"file {path}")


def critic_role(draft: Draft) -> None:
    """Check that a critic uses the policy's value for each flag that it cannot set separately."""
    refused = [
        f"{FLAG}: the critic's {name} is {value}, the policy's is {draft.values.get(name)}: both train on "
        "the same processes and batches; leave it out, or give both the same."
        for name, value in draft.critic_overrides.items()
        if name not in OWN and draft.values.get(name) != value
    ]
    own = {name: value for name, value in draft.critic_overrides.items() if name in OWN}
    draft.set("critic_overrides", own, draft.sources["critic_overrides"])
    if refused:
        raise Refused(refused)


def without_idle(settings: dict[str, Any], draft: Draft, path: str) -> dict[str, Any]:
    """Return `settings` without the keys that place a role on machines; each is reported."""
    for name in (name for name in _IDLE if name in settings):
        draft.idle.append(f"{name} in {path} is set, but a critic trains on the processes of the policy.")
    return {name: value for name, value in settings.items() if name not in _IDLE}
