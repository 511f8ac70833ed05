"""Extracts the flags of another program from a command line, and checks them against its own list."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from slime.arguments.core.draft import Refused


def split_flags(
    argv: list[str], owner_of: Callable[[str], str | None]
) -> tuple[list[str], defaultdict[str, dict[str, list[str]]]]:
    """Take the flags that have an owner (asked for with `-` in the name) out of a command line.

    Returns the other arguments, and owner -> option as written -> its values; the last one wins. Example:
    `--seed 1 --sglang-tp 2` becomes (["--seed", "1"], {"sglang": {"--sglang-tp": ["2"]}}).
    """
    rest: list[str] = []
    found: defaultdict[str, dict[str, list[str]]] = defaultdict(dict)
    current = rest
    for word in argv:
        if word.startswith("--"):
            current = rest
            option, equals, value = word.partition("=")
            owner = owner_of(option.replace("_", "-"))
            if owner is not None:
                current = found[owner][option] = [value] if equals else []
                continue
        current.append(word)
    return rest, found


def yaml_words(value: Any) -> list[str] | None:
    """Return a value of a file as command-line arguments; None: the flag is off."""
    if value is None or value is False:
        return None
    if value is True:
        return []
    return [str(v) for v in value] if isinstance(value, list) else [str(value)]


def yaml_flag(option: str, value: Any, *, negates: bool) -> dict[str, list[str]]:
    """Return a key of a file as a flag and its values; false is `--no-...` if the program has such flags."""
    words = yaml_words(value)
    if words is not None:
        return {option: words}
    return {"--no-" + option.removeprefix("--"): []} if negates and value is False else {}


@dataclass(frozen=True)
class ProgramFlag:
    """One flag of the program: `options` as the program spells them, `nargs` 0 for a switch."""

    options: tuple[str, ...]
    dest: str
    nargs: int | str | None
    kind: str | None  # "int", "float", "str" or the name of the program's own parser
    choices: tuple[str, ...] | None
    help: str

    def read(self, words: list[str], option: str) -> Any:
        """Convert the arguments after the flag to a value; the program checks them again."""
        if self.nargs == 0 and words:
            raise ValueError(f"{option} is a switch and takes no value, but {words[0]!r} follows it.")
        if self.nargs is None and len(words) != 1:
            raise ValueError(f"{option} takes one value, found {len(words)}.")
        if wrong := [word for word in words if self.choices and word not in self.choices]:
            raise ValueError(f"{option} is {wrong[0]!r}: SGLang takes {', '.join(self.choices or ())}.")
        reader = _READERS.get(self.kind or "", str)
        try:
            values = [reader(word) for word in words]
        except ValueError:
            raise ValueError(f"{option} is {' '.join(words)!r}: SGLang expects {self.kind} there.") from None
        if self.nargs in ("+", "*"):
            return values
        return values[0] if values else True


@dataclass(frozen=True)
class ProgramFlags:
    """The whole command line of one installed program, whose flags slime takes with a prefix."""

    program: str  # with its version, if known
    prefix: str
    owned: Mapping[str, str]  # flags that slime sets itself -> what decides them
    by_option: Mapping[str, ProgramFlag]  # "--mem-fraction-static" -> its flag
    renamed: Mapping[str, str] = field(default_factory=dict)  # name in another release -> its meaning
    left_out: frozenset[str] = frozenset()  # owned flags that may be given: they are reported and dropped

    def find(self, option: str) -> ProgramFlag:
        """Return the flag named `--sglang-mem-fraction-static` (or with `_`); ValueError: there is none."""
        name = self.own_option(option)
        flag = self.by_option.get(name)
        if flag is None:
            near = get_close_matches(name, self.by_option, n=1, cutoff=0.8)
            hint = f"; did you mean {self.prefix}{near[0].removeprefix('--')}?" if near else "."
            raise ValueError(f"unknown flag {option}: {self.program} has no {name}{hint}")
        if flag.dest in self.owned:
            raise ValueError(f"{option} cannot be given: {self.owned[flag.dest]}.")
        return flag

    def own_option(self, option: str) -> str:
        """Return the flag as the program itself spells it."""
        return "--" + option.removeprefix(self.prefix).replace("_", "-")

    def translate(self, option: str) -> str | None:
        """Return this release's name for a flag of another; `""` if it was removed, None if there is none."""
        name = self.own_option(option)
        words = self.renamed.get(name) if name not in self.by_option else None
        return words if words is None or not words or words.split()[0] in self.by_option else None

    def note(self, option: str, now: str) -> str:
        return f"{option}: {self.program} {f'calls it {now}' if now else 'has no such flag'}."

    def read(self, found: Mapping[str, list[str]]) -> tuple[dict[str, Any], list[str], list[str]]:
        """Return (name -> value, the words for the program's own command line, what to report)."""
        values, words, notes, refused = {}, [], [], []
        for option, given in found.items():
            now = self.translate(option)
            if now is not None:
                notes.append(self.note(option, now))
                if not now:
                    continue
                option, *more = (self.prefix + now.removeprefix("--")).split()
                given = [*more, *given]
            known = self.by_option.get(self.own_option(option))
            if known is not None and known.dest in self.left_out:
                notes.append(f"{option} is left out: {self.owned[known.dest]}.")
                continue
            try:
                flag = self.find(option)
                values[flag.dest] = flag.read(given, option)
                words += [self.own_option(option), *given]
            except ValueError as error:
                refused.append(str(error))
        if refused:
            raise Refused(refused)
        return values, words, notes


class UncheckedFlags(dict[str, ProgramFlag]):
    """Contains a flag for every option: the program is not installed, and a plan needs only its sizes."""

    def get(self, option: str, default: Any = None) -> Any:
        return ProgramFlag((option,), option.removeprefix("--").replace("-", "_"), "?", "number", None, "")

    def __contains__(self, option: object) -> bool:
        return True


def _number_or_text(word: str) -> int | str:
    return int(word) if word.isdecimal() else word


_READERS: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "number": _number_or_text}


def read_flag_rows(rows: list[dict[str, Any]]) -> dict[str, ProgramFlag]:
    """Return option -> flag, from the rows in which an installed program describes its command line."""
    flags = {}
    for row in rows:
        choices = tuple(row["choices"]) if row["choices"] else None
        flag = ProgramFlag(
            tuple(row["options"]), row["dest"], row["nargs"], row["type"], choices, row["help"]
        )
        flags.update(dict.fromkeys(flag.options, flag))
    return flags
