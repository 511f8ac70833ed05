"""Arguments while they are being made: sources are laid over each other, then rules check and derive."""

from typing import Any

from slime.arguments.args import Args

# The loops that may run the settings.
SYNCHRONOUS, ASYNCHRONOUS = "synchronous", "asynchronous"
DEFAULT = "default"
COMMAND_LINE = "command line"


class Draft:
    """Values and their sources before they are frozen. Values read
    as attributes: `draft.rollout_batch_size`.
    """

    def __init__(self, defaults: dict[str, Any], *, training_loop: str = SYNCHRONOUS):
        self.training_loop = training_loop  # no setting: whoever runs them knows
        self._values = dict(defaults)
        self._sources = dict.fromkeys(defaults, DEFAULT)
        self._warnings: list[str] = []

    @classmethod
    def of(cls, args: Args, *, training_loop: str) -> "Draft":
        """Settings that are made again, with their sources."""
        draft = cls({}, training_loop=training_loop)
        for name, value in args.to_dict().items():
            draft.set(name, value, args.sources[name])
        for message in args.warnings:
            draft.warn(message)
        return draft

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._values:
            raise AttributeError(f"no argument is called {name}")
        return self._values[name]

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def source(self, name: str) -> str:
        return self._sources[name]

    def set(self, name: str, value: Any, source: str) -> None:
        self._values[name] = value
        self._sources[name] = source

    def derive(self, name: str, value: Any, because: str) -> None:
        """Give a value that follows from others; `because` is what
        --print-config shows. No change, no new source.
        """
        if name not in self._values or self._values[name] != value:
            self.set(name, value, f"derived: {because}")

    def was_given(self, name: str) -> bool:
        """Whether the user wrote it (in a file or on the command line)."""
        return self._sources[name] != DEFAULT and not self._sources[name].startswith("derived")

    def warn(self, message: str) -> None:
        """Tell at the start of a setting that does nothing and changes nothing of what is trained."""
        self._warnings.append(message)

    def freeze(self) -> Args:
        return Args(self._values, self._sources, self._warnings)
