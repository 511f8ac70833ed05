"""Environments: the families of `--env FAMILY:TASK`, and how such a choice is written."""

import re
from dataclasses import dataclass

_ADAPTERS = "slime.agent.environments"
SOURCE = "env:"  # prefix of a choice that is given in place of a prompt file
MCP = "mcp"  # the family whose task is a whole command
OPENENV = "openenv"  # the family whose tasks are addresses
OWN = "own"  # the family of `module:Class` and `path/to/file.py:Class`
HELD_OUT, TRAINING = "heldout", "train"


@dataclass(frozen=True, slots=True)
class EnvironmentFamily:
    """One family. `module` has `make(task, options)` and may have `task_names()`, which limits the names."""

    module: str
    help: str
    package: str | None = None
    extra: str | None = None
    plays_itself: bool = False  # its turns are those of a session: `module` has `play`, not `make`


ENVIRONMENTS: dict[str, EnvironmentFamily] = {
    "reasoning_gym": EnvironmentFamily(
        f"{_ADAPTERS}.reasoning_gym",
        "questions of one turn with a checker, by the name of the task: reasoning_gym:chain_sum",
        "reasoning_gym",
        "reasoning-gym",
    ),
    "textarena": EnvironmentFamily(
        f"{_ADAPTERS}.textarena",
        "games for one or two players; the policy plays all of them: textarena:TicTacToe-v0",
        "textarena",
        "textarena",
    ),
    "gymnasium": EnvironmentFamily(
        f"{_ADAPTERS}.gymnasium",
        "environments whose observations and actions can be written as text: gymnasium:FrozenLake-v1",
        "gymnasium",
        "gymnasium",
    ),
    "verifiers": EnvironmentFamily(
        f"{_ADAPTERS}.verifiers",
        "tasksets of the package verifiers, with their own agents: verifiers:gsm8k-v1",
        "verifiers",
        "verifiers",
        plays_itself=True,
    ),
    OPENENV: EnvironmentFamily(
        f"{_ADAPTERS}.openenv",
        "servers of OpenEnv, by address or image of a container: openenv:http://127.0.0.1:8000",
        "openenv",
        "openenv",
    ),
    MCP: EnvironmentFamily(
        f"{_ADAPTERS}.mcp",
        "the tools of an MCP server, by address or command; prompts come from --prompt-data: mcp:http://HOST/mcp",
        "mcp",
        "mcp",
        plays_itself=True,
    ),
    OWN: EnvironmentFamily(
        f"{_ADAPTERS}.own", "a class of yours: my_package.envs:Maze or path/to/file.py:Maze"
    ),
}


@dataclass(frozen=True, slots=True)
class Choice:
    """One task of `--env`. Example: `reasoning_gym:gcd=2` is Choice("reasoning_gym", "gcd", 2.0)."""

    family: str
    task: str
    weight: float = 1.0

    @property
    def name(self) -> str:
        """Return the name as users write it, without the weight."""
        return self.task if self.family == OWN else f"{self.family}:{self.task}"

    @property
    def short(self) -> str:
        """Return the name in metrics: that of the task, of the class, or of the server."""
        if self.family == OPENENV:
            return self.task.rstrip("/").rpartition("/")[2]
        return self.task.rpartition(":")[2] if self.family == OWN else self.task


def read_choices(text: str, flag: str = "--env") -> list[Choice]:
    """Parse `reasoning_gym:chain_sum=2,gcd` into two choices; commas (or `+`) separate tasks of a family."""
    family, colon, tasks = text.partition(":")
    named = [name for name in ENVIRONMENTS if name != OWN]
    if not colon or not tasks.strip():
        known = ", ".join(named)
        raise ValueError(f"{flag} is {text!r}: write FAMILY:TASK with a family of {known}, or module:Class.")
    if family not in named:
        return [Choice(OWN, text.strip())]
    if family == MCP:
        return [Choice(MCP, tasks.strip())]
    choices = [_read_choice(family, part, text, flag) for part in re.split("[,+]", tasks) if part.strip()]
    if len({choice.task for choice in choices}) < len(choices):
        raise ValueError(f"{flag} is {text!r}: a task is listed twice; give it a weight instead: TASK=2.")
    return choices


def _read_choice(family: str, part: str, text: str, flag: str) -> Choice:
    match = re.fullmatch(rf"(?:{family}:)?([^=]+)(?:=([0-9.eE+-]+))?", part.strip())
    try:
        weight = float(match[2] or 1) if match else 0.0
    except ValueError:
        weight = 0.0
    if match is None or not 0 < weight < float("inf"):
        raise ValueError(f"{flag} is {text!r}: {part.strip()!r} is not TASK, or TASK=WEIGHT above 0.")
    return Choice(family, match[1], weight)


def source_of(choices: list[Choice], split: str, count: int) -> str:
    """Return a choice as a source of prompts: `env:reasoning_gym:chain_sum=2+gcd#train:10000`."""
    tasks = "+".join(c.task if c.weight == 1 else f"{c.task}={c.weight:g}" for c in choices)
    prefix = "" if choices[0].family == OWN else f"{choices[0].family}:"
    return f"{SOURCE}{prefix}{tasks}#{split}:{count}"


def read_source(source: str) -> tuple[list[Choice], str, int]:
    """Invert `source_of`. Defaults: 1000 items, and the split for training."""
    match = re.match(r"^env:(?P<tasks>.+?)(#(?P<split>\w+)(:(?P<count>\d+))?)?$", source)
    split = (match["split"] if match else None) or TRAINING
    if match is None or split not in (TRAINING, HELD_OUT):
        raise ValueError(f"{source}: items of an environment are written env:FAMILY:TASK#{TRAINING}:COUNT.")
    return read_choices(match["tasks"], "the environment"), split, int(match["count"] or 1000)
