"""Settings while they are being made: values are laid over each other, then rules check and derive."""

import copy
from collections.abc import Mapping
from typing import Any

from slime.arguments.core.flag import FlagSpec

# The loops that may run the settings.
SYNCHRONOUS, ASYNCHRONOUS = "synchronous", "asynchronous"
DEFAULT = "default"
COMMAND_LINE = "command line"


class Draft:
    """Values and their sources before they are frozen; values are attributes: `draft.lr`."""

    def __init__(self, specs: Mapping[str, FlagSpec], *, training_loop: str = SYNCHRONOUS):
        self.specs = specs
        self.training_loop = training_loop  # no setting: whoever runs them knows
        self.values: dict[str, Any] = {name: copy.copy(spec.default) for name, spec in specs.items()}
        self.sources = dict.fromkeys(specs, DEFAULT)
        self.warnings: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name in ("values", "specs") or name not in self.values:
            raise AttributeError(f"no argument is called {name}")
        return self.values[name]

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def set(self, name: str, value: Any, source: str) -> None:
        self.values[name] = value
        self.sources[name] = source

    def derive(self, name: str, value: Any, because: str) -> None:
        """Give a value that follows from others; `because` is what --print-config shows as its source."""
        if name not in self.values or self.values[name] != value:
            self.set(name, value, f"derived: {because}")

    def was_given(self, name: str) -> bool:
        """Whether the user wrote it (in a file or on the command line)."""
        return self.sources[name] != DEFAULT and not self.sources[name].startswith("derived")

    def warn(self, message: str) -> None:
        """Tell the user at the start of a setting that does nothing here and changes no training."""
        self.warnings.append(message)


def refuse_flags_without_effect(draft: Draft) -> None:
    """Refuse a flag that was given and does nothing beside the others: its declaration says when it does."""
    for name, spec in draft.specs.items():
        value = getattr(draft, name)
        if not draft.was_given(name) or value == spec.default:
            continue
        for condition in spec.info.only_with:
            if not condition.works(draft):
                shown = "set" if spec.kind is bool or spec.info.secret else f"{value}"
                raise ValueError(f"{spec.option} is {shown}, but {condition.reason}.")
