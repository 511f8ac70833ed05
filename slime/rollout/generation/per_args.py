"""A metaclass for what the functions of one run share: made once for each args object."""

from typing import Any

from slime.arguments import PluginArgs, with_defaults


class OnePerArgs(type):
    """`Kind(args)` gives the same object for the same args object; the last few are remembered."""

    def __init__(cls, *definition: Any) -> None:
        super().__init__(*definition)
        cls._made: list[tuple[Any, Any]] = []

    def __call__(cls, args: PluginArgs) -> Any:
        for known, made in cls._made:
            if known is args:
                return made
        made = super().__call__(with_defaults(args))
        cls._made.append((args, made))
        del cls._made[:-4]
        return made
