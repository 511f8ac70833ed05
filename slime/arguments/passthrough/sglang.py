"""The flags of the installed SGLang as `--sglang-<flag>`: asked once from the
interpreter that has it, checked, passed on.

SGLang lives in an environment of its own and is never imported here. Its table of flags is cached by version.
"""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from slime.arguments.core.devices import visible_gpus
from slime.arguments.core.unbuilt import is_unbuilt

PREFIX = "--sglang-"
_PACKAGE = Path(__file__).parents[2]
_LAUNCH = _PACKAGE / "engines" / "sglang" / "launch.py"
_TABLE_MARK = "SGLANG-FLAGS "
_ASK_TIMEOUT_S = 300.0

# Flags that slime sets itself, and what decides them.
OWNED = {
    "model_path": "--hf-checkpoint decides it",
    "host": "slime chooses the address of its engines",
    "port": "slime chooses the ports of its engines",
    "nccl_port": "slime chooses the ports of its engines",
    "grpc_port": "slime speaks HTTP to its engines",
    "tp_size": "--rollout-num-gpus-per-engine decides it",
    "nnodes": "--rollout-num-gpus-per-engine and --num-gpus-per-node decide it",
    "node_rank": "slime places the engines",
    "dist_init_addr": "slime places the engines",
    "base_gpu_id": "slime places the engines",
    "gpu_id_step": "slime places the engines",
    "device": "engines use the GPUs that slime gives them, or the CPU where there is none",
    "weight_version": "each weight push sets it",
    "enable_memory_saver": "--offload-rollout decides it",
    "skip_tokenizer_init": "answers must carry text",
    "random_seed": "--seed decides it",
    "api_key": "each run makes its own where other machines reach its engines, or takes SLIME_ENGINE_TOKEN",
    "admin_api_key": "each run makes its own where other machines reach its engines, or takes "
    "SLIME_ENGINE_TOKEN",
}


@dataclass(frozen=True)
class ServerFlag:
    """One flag of SGLang: `options` as SGLang spells them, `nargs` 0 for a switch."""

    options: tuple[str, ...]
    dest: str
    nargs: int | str | None
    kind: str | None  # "int", "float", "str" or a parser of SGLang's own
    choices: tuple[str, ...] | None
    help: str

    def read(self, words: list[str], option: str) -> Any:
        """The words after the flag as a value; SGLang checks again what it reads itself."""
        reader = {"int": int, "float": float}.get(self.kind or "", str)
        values = []
        for word in words:
            if self.choices and word not in self.choices:
                raise ValueError(f"{option} is {word!r}: SGLang takes {', '.join(self.choices)}.")
            try:
                values.append(reader(word))
            except ValueError:
                raise ValueError(f"{option} is {word!r}: SGLang expects {self.kind} there.") from None
        if self.nargs == 0:
            if values:
                raise ValueError(f"{option} is a switch and takes no value, but {words[0]!r} follows it.")
            return True
        if self.nargs in ("+", "*"):
            return values
        if len(values) != 1 and self.nargs != "?":
            raise ValueError(f"{option} takes one value, found {len(values)}.")
        return values[0] if values else True


@dataclass(frozen=True)
class ServerFlags:
    """The whole command line of one installed version."""

    version: str
    by_option: dict[str, ServerFlag]  # "--mem-fraction-static" -> its flag

    def find(self, option: str) -> ServerFlag:
        """The flag that `--sglang-mem-fraction-static` (or `_` for `-`)
        means; a ValueError that helps otherwise.
        """
        server_option = "--" + option.removeprefix(PREFIX).replace("_", "-")
        flag = self.by_option.get(server_option)
        if flag is None:
            if is_unbuilt(option.removeprefix("--").replace("_", "-")):
                raise ValueError(f"{option} is a slime flag that this version does not build yet.")
            near = get_close_matches(server_option, self.by_option, n=1, cutoff=0.6)
            hint = f"; did you mean {PREFIX}{near[0].removeprefix('--')}?" if near else "."
            raise ValueError(f"unknown flag {option}: SGLang {self.version} has no {server_option}{hint}")
        if flag.dest in OWNED:
            raise ValueError(f"{option} cannot be given: {OWNED[flag.dest]}.")
        return flag


def find_python(given: str | None, environment: str = ".venv-sglang", module: str = "sglang") -> str | None:
    """The interpreter that has SGLang: the one given, that of `make
    sglang-env`, or this one. None: there is none.
    """
    if given is not None:
        return given
    for folder in (Path.cwd(), _PACKAGE.parent):
        python = folder / environment / "bin" / "python"
        if python.exists():
            return str(python)
    return sys.executable if importlib.util.find_spec(module) else None


def need_python(given: str | None, reason: str) -> str:
    python = find_python(given)
    if python is None:
        raise ValueError(
            f"{reason} needs SGLang, which is not installed: run `make sglang-env`, or give --sglang-python."
        )
    if not Path(python).is_file():
        raise ValueError(f"--sglang-python is {python}: no such file.")
    return python


def server_flags(python: str) -> ServerFlags:
    """The flags of the SGLang that `python` has; asked once per version, since that takes half a minute."""
    version = _installed_version(python)
    cache = _cache_folder() / f"sglang-flags-{version}.json"
    if cache.exists():
        return _read_table(json.loads(cache.read_text()))
    table = _ask(python)
    part = cache.with_suffix(f".{os.getpid()}")
    part.write_text(json.dumps(table))
    part.rename(cache)
    return _read_table(table)


def _installed_version(python: str) -> str:
    code = "import importlib.metadata as m; print(m.version('sglang'))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise ValueError(
            f"--sglang-python is {python}: it has no SGLang ({done.stderr.strip().splitlines()[-1]})."
        )
    return done.stdout.strip()


def _ask(python: str) -> dict[str, Any]:
    device = [] if visible_gpus() else ["--device", "cpu"]
    done = subprocess.run(
        [python, "-P", str(_LAUNCH), "--print-flags", *device],
        capture_output=True,
        text=True,
        timeout=_ASK_TIMEOUT_S,
    )
    for line in done.stdout.splitlines():
        if line.startswith(_TABLE_MARK):
            return json.loads(line.removeprefix(_TABLE_MARK))
    raise ValueError(f"--sglang-python is {python}: SGLang did not say its flags:\n{done.stderr[-2000:]}")


def _read_table(table: dict[str, Any]) -> ServerFlags:
    return ServerFlags(table["version"], read_flag_rows(table["flags"]))


def read_flag_rows(rows: list[dict[str, Any]]) -> dict[str, ServerFlag]:
    """Option -> flag, from the rows in which an installed program describes its own command line."""
    flags = {}
    for row in rows:
        choices = tuple(row["choices"]) if row["choices"] else None
        flag = ServerFlag(tuple(row["options"]), row["dest"], row["nargs"], row["type"], choices, row["help"])
        flags.update(dict.fromkeys(flag.options, flag))
    return flags


def _cache_folder() -> Path:
    folder = Path.home() / ".cache" / "slime"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    except OSError:  # a home that cannot be written
        return Path(tempfile.gettempdir())


def split_server_flags(argv: list[str], ours: set[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Takes `--sglang-...` flags that are not slime's own out of a
    command line: (the rest, option -> its words).
    """
    rest: list[str] = []
    found: dict[str, list[str]] = {}
    current: list[str] | None = None
    for word in argv:
        option, equals, value = word.partition("=")
        if word.startswith("--"):
            current = None
            if option.startswith(PREFIX) and option.replace("_", "-") not in ours:
                current = found.setdefault(option, [])
                current.clear()  # given twice: the last one counts, as everywhere
                current += [value] if equals else []
                continue
        (rest if current is None else current).append(word)
    return rest, found


def yaml_words(value: Any) -> list[str] | None:
    """A value of a file as the words of a command line; None: the flag is off."""
    if value is None or value is False:
        return None
    if value is True:
        return []
    return [str(v) for v in value] if isinstance(value, list) else [str(value)]


def read_server_flags(found: dict[str, list[str]], python: str) -> tuple[dict[str, Any], list[str]]:
    """(`sglang_<name>` -> value for args, the words for the server's own command line)."""
    table = server_flags(python)
    values: dict[str, Any] = {}
    words: list[str] = []
    for option, given in found.items():
        flag = table.find(option)
        values[f"sglang_{flag.dest}"] = flag.read(given, option)
        words += ["--" + option.removeprefix(PREFIX).replace("_", "-"), *given]
    return values, words
