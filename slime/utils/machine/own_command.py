"""Formats `slime` commands as the user can type them here."""

import os
import shlex
import shutil
import sys
from pathlib import Path


def as_typed(*words: object) -> str:
    """Return a command line of slime that the shell finds: `slime plot RUN`, `.venv/bin/slime plot RUN`, ...

    `slime` alone is right only if PATH leads to this installation, as in an activated environment.
    """
    return " ".join([_program(), *(shlex.quote(str(word)) for word in words)])


def _program() -> str:
    script = Path(sys.executable).with_name("slime")
    if not script.is_file():  # imported from a source tree, or by an embedded interpreter
        return f"{shlex.quote(_near(Path(sys.executable)))} -m slime" if sys.executable else "slime"
    found = shutil.which("slime")
    return "slime" if found and os.path.samefile(found, script) else shlex.quote(_near(script))


def _near(path: Path) -> str:
    """Return a path relative to the current folder, if it is below it."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
