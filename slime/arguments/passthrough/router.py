"""The flags of SGLang's router as `--router-<flag>`: asked once from the
interpreter that has it, checked, passed on.
"""

import functools
import json
import subprocess
from difflib import get_close_matches
from pathlib import Path

from slime.arguments.passthrough.sglang import ServerFlag, find_python, read_flag_rows

PREFIX = "--router-"
_ASK_TIMEOUT_S = 120.0
# Flags that slime sets itself, and what decides them.
OWNED = {
    "host": "slime chooses the address of its router",
    "port": "--sglang-router-port decides it",
    "worker_urls": "slime registers its engines itself",
    "prefill": "slime registers its engines itself",
    "decode": "slime registers its engines itself",
    "pd_disaggregation": "the topology decides it (--sglang-config or --prefill-num-servers)",
    "prometheus_port": "slime chooses a free one",
    "request_timeout_secs": "--sglang-router-request-timeout-secs decides it",
}
_ASK = """
import argparse, json
from sglang_router.router_args import RouterArgs
parser = argparse.ArgumentParser(add_help=False)
RouterArgs.add_cli_args(parser)
rows = [{"options": a.option_strings, "dest": a.dest, "nargs": a.nargs, "type": getattr(a.type, "__name__", None),
         "choices": [str(c) for c in a.choices] if a.choices else None, "help": a.help or ""} for a in parser._actions]
print(json.dumps(rows + [{"options": ["--host"], "dest": "host", "nargs": None, "type": "str", "choices": None, "help": ""},
    {"options": ["--port"], "dest": "port", "nargs": None, "type": "int", "choices": None, "help": ""}]))
"""


def need_router_python(given: str | None, reason: str) -> str:
    """Its own environment: it needs no torch, and a torchvision that does not load keeps it from starting."""
    python = find_python(given, ".venv-router", "sglang_router")
    if python is None:
        raise ValueError(
            f"{reason} needs sglang-router, which is not installed: run `make sglang-env`, or give "
            "--router-python."
        )
    if not Path(python).is_file():
        raise ValueError(f"--router-python is {python}: no such file.")
    return python


@functools.cache
def router_flags(python: str) -> dict[str, ServerFlag]:
    """Every option of the router that `python` has."""
    done = subprocess.run([python, "-c", _ASK], capture_output=True, text=True, timeout=_ASK_TIMEOUT_S)
    if done.returncode:
        raise ValueError(
            f"--router-python is {python}: it has no sglang-router ({done.stderr.strip()[-300:]})."
        )
    return read_flag_rows(json.loads(done.stdout.splitlines()[-1]))


def split_router_flags(argv: list[str], ours: set[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Takes `--router-...` flags that are not slime's own out of a
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
                current = found[option] = [value] if equals else []
                continue
        (rest if current is None else current).append(word)
    return rest, found


def read_router_flags(found: dict[str, list[str]], python: str) -> list[str]:
    """The words for the router's own command line; an unknown or misspelt one is a ValueError that helps."""
    table, words = router_flags(python), []
    for option, given in found.items():
        name = "--" + option.removeprefix(PREFIX).replace("_", "-")
        known = table.get(name)
        if known is None:
            near = get_close_matches(name, table, n=1, cutoff=0.6)
            hint = f"; did you mean {PREFIX}{near[0].removeprefix('--')}?" if near else "."
            raise ValueError(f"unknown flag {option}: sglang-router has no {name}{hint}")
        if known.dest in OWNED:
            raise ValueError(f"{option} cannot be given: {OWNED[known.dest]}.")
        known.read(given, option)
        words += [name, *given]
    return words
