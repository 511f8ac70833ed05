"""Settings under construction: layers of values are merged, then rules check them and derive others."""

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from slime.arguments.core.flag import FlagSpec

# The loops that may run the settings.
SYNCHRONOUS, ASYNCHRONOUS = "synchronous", "asynchronous"
DEFAULT = "default"
PRESET = "preset"  # set by a command such as `slime sft`
COMMAND_LINE = "command line"


class Refused(ValueError):
    """Several reasons why settings are refused."""

    def __init__(self, reasons: Sequence[str]):
        super().__init__("\n".join(reasons))
        self.reasons = reasons


class Refusals:
    """Collects reasons why settings are refused, so that one error reports all of them, grouped."""

    def __init__(self) -> None:
        self.groups: dict[str, list[str]] = {}

    def add(self, group: str, reason: str) -> None:
        reasons = self.groups.setdefault(group, [])
        if reason not in reasons:
            reasons.append(reason)

    @contextlib.contextmanager
    def collect(self, group: str) -> Iterator[None]:
        """Collect a ValueError of the body as a reason. After the first, rules may fail because of it."""
        try:
            yield
        except Refused as error:
            for reason in error.reasons:
                self.add(group, reason)
        except ValueError as error:
            self.add(group, str(error))
        except Exception:
            if not self.groups:
                raise

    def raise_all(self) -> None:
        reasons = [reason for group in self.groups.values() for reason in group]
        if len(reasons) == 1:
            raise ValueError(reasons[0])
        if reasons:
            lines = [f"{len(reasons)} problems found; nothing was started."]
            for title, group in self.groups.items():
                lines += [f"{title}:", *("  " + reason.replace("\n", "\n  ") for reason in group)]
            raise Refused(lines)


class Draft:
    """Values and their sources before they are frozen; values are attributes: `draft.lr`."""

    def __init__(self, specs: Mapping[str, FlagSpec], *, training_loop: str = SYNCHRONOUS):
        self.specs = specs
        self.training_loop = training_loop  # not a setting: the caller knows it
        self.values: dict[str, Any] = {name: copy.copy(spec.default) for name, spec in specs.items()}
        self.sources = dict.fromkeys(specs, DEFAULT)
        self.warnings: list[str] = []
        self.idle: list[str] = []  # flags without any effect here, not even on what is trained, and why

    def __getattr__(self, name: str) -> Any:
        if name in ("values", "specs") or name not in self.values:
            raise AttributeError(f"no argument is called {name}")
        return self.values[name]

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def set(self, name: str, value: Any, source: str) -> None:
        self.values[name] = value
        self.sources[name] = source

    def preset(self, values: Mapping[str, Any]) -> None:
        """Set a command's values for flags that the user did not set."""
        for name, value in values.items():
            if not self.was_given(name):
                self.set(name, value, PRESET)

    def derive(self, name: str, value: Any, because: str) -> None:
        """Set a value that follows from others; --print-config shows `because` as its source."""
        if name not in self.values or self.values[name] != value:
            self.set(name, value, f"derived: {because}")

    def was_given(self, name: str) -> bool:
        """Return whether the user set this flag (in a file or on the command line)."""
        return is_given(self.sources[name])

    def warn(self, message: str) -> None:
        """Show a message about the settings at the start of the run."""
        self.warnings.append(message)


def is_given(source: str) -> bool:
    """Return whether a value comes from the user: from a file or the command line."""
    return source != DEFAULT and not source.startswith("derived")


def refuse_flags_without_effect(draft: Draft) -> None:
    """Refuse given flags that have no effect with the others; a harmless one is only reported."""
    refused: list[str] = []
    for name, spec in draft.specs.items():
        value = getattr(draft, name)
        if not draft.was_given(name) or value == spec.default:
            continue
        lacks = next((c for c in spec.info.only_with if not c.works(draft)), None)
        if lacks is None or draft.sources[name] == f"file {draft.custom_config_path}":
            continue
        shown = "set" if spec.kind is bool or spec.info.secret else f"{value}"
        (draft.idle if lacks.is_harmless(draft) else refused).append(
            f"{spec.option} is {shown}, but it has an effect only {lacks.words}."
        )
    if refused:
        raise Refused(refused)


def report_idle_flags(draft: Draft) -> None:
    """Warn once of all flags that do nothing here; --strict refuses them."""
    if draft.idle and draft.strict:
        raise Refused([f"{line} (--strict)" for line in draft.idle])
    if draft.idle:
        count = "this flag does" if len(draft.idle) == 1 else f"these {len(draft.idle)} flags do"
        draft.warn("\n    ".join([f"{count} nothing here (--strict refuses such):", *draft.idle]))
