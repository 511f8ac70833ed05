"""The flags of SGLang's router as `--router-<flag>`: asked once from the interpreter that has it."""

import functools
import json
import subprocess

from slime.arguments.passthrough.program import ProgramFlags, UncheckedFlags, read_flag_rows
from slime.arguments.passthrough.sglang_flags import NOT_HERE, find_python
from slime.utils.machine.described import described

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


def row(options, dest, type, nargs=None, choices=None, help=""):
    return {"options": options, "dest": dest, "nargs": nargs, "type": type, "choices": choices, "help": help}


rows = [row(["--host"], "host", "str"), row(["--port"], "port", "int")]
for a in parser._actions:
    choices = [str(c) for c in a.choices] if a.choices else None
    kind = getattr(a.type, "__name__", None)
    rows.append(row(a.option_strings, a.dest, kind, a.nargs, choices, a.help or ""))
print(json.dumps(rows))
"""


def need_router_python(reason: str) -> str:
    """Return the interpreter of the router's own environment, or `NOT_HERE` as `need_python` does."""
    python = find_python(None, ".venv-router", "sglang_router")
    if python is None and described.get():
        return NOT_HERE
    if python is None:
        raise ValueError(
            f"{reason} needs sglang-router, which is not installed: run `make sglang-env`, or "
            "install it into this Python."
        )
    return python


@functools.cache
def router_flags(python: str) -> ProgramFlags:
    """Return every option of the router that `python` has."""
    if python == NOT_HERE:
        return ProgramFlags("sglang-router", PREFIX, OWNED, UncheckedFlags())
    done = subprocess.run([python, "-c", _ASK], capture_output=True, text=True, timeout=_ASK_TIMEOUT_S)
    if done.returncode:
        raise ValueError(f"{python} has no sglang-router ({done.stderr.strip()[-300:]}).")
    rows = json.loads(done.stdout.splitlines()[-1])
    return ProgramFlags("sglang-router", PREFIX, OWNED, read_flag_rows(rows))


def read_router_flags(found: dict[str, list[str]], python: str) -> list[str]:
    """Return the arguments of the router's command line; ValueError with a hint for an unknown one."""
    return router_flags(python).read(found)[1]
