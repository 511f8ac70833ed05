"""Small helpers: loading a function by path, grouping, periodic actions, binary metadata."""

from __future__ import annotations

import base64
import functools
import hashlib
import importlib
import importlib.util
import subprocess
import sys
import threading
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slime.utils.machine.ports import is_port_available


@functools.cache
def load_function(path: str) -> Any:
    """Load the object at `pkg.module.name` or `path/to/file.py:name` (a function or a class)."""
    if ":" in path:
        file, _, name = path.rpartition(":")
        module = _load_file(file) if file.endswith(".py") else importlib.import_module(file)
    else:
        module_name, _, name = path.rpartition(".")
        if not module_name:
            raise ValueError(
                f"{path!r} is not an import path: write pkg.module.function or path/to/file.py:function"
            )
        module = importlib.import_module(module_name)
    if not hasattr(module, name):
        public = sorted(n for n in vars(module) if not n.startswith("_") and callable(getattr(module, n)))
        raise AttributeError(
            f"{path!r}: module {module.__name__} has no {name!r}; it defines {', '.join(public)}"
        )
    return getattr(module, name)


_loading = threading.RLock()  # a plug-in may load another while it is loaded


def plugin_module_name(file: Path) -> str:
    """Return the module name of a plug-in file, the same in every process of the run."""
    resolved = file.resolve()
    return f"slime_plugin_{resolved.stem}_{hashlib.sha256(str(resolved).encode()).hexdigest()[:12]}"


def _load_file(file: str) -> Any:
    resolved = Path(file).expanduser().resolve()
    if not resolved.is_file():
        raise FileNotFoundError(f"no such plug-in file: {file}")
    name = plugin_module_name(resolved)
    with _loading:  # environments load in their own threads, which must not see a half-loaded module
        if name not in sys.modules:
            spec = importlib.util.spec_from_file_location(name, resolved)
            assert spec is not None and spec.loader is not None, f"Python has no loader for {resolved}"
            sys.modules[name] = importlib.util.module_from_spec(spec)
            try:
                spec.loader.exec_module(sys.modules[name])
            except BaseException:
                del sys.modules[name]
                raise
        return sys.modules[name]


def is_installed(module: str) -> bool:
    """Return whether a module can be imported, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package that it would be in
        return False


class SingletonMeta(type):
    """A metaclass with one instance per class and process."""

    _instances: dict[type, Any] = {}  # noqa: RUF012 - shared on purpose

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls not in SingletonMeta._instances:
            SingletonMeta._instances[cls] = super().__call__(*args, **kwargs)
        return SingletonMeta._instances[cls]


@dataclass(frozen=True)
class Box:
    """Carries a reference without letting the transport resolve it."""

    inner: Any


def group_by(items: Iterable[Any], key: Callable[[Any], Hashable]) -> dict[Hashable, list[Any]]:
    """Group items by key, keys in order of first appearance."""
    groups: dict[Hashable, list[Any]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def should_run_periodic_action(
    rollout_id: int,
    interval: int | None,
    num_rollout_per_epoch: int | None = None,
    num_rollout: int | None = None,
) -> bool:
    """Return True after every `interval` rollouts, at each epoch's end and after the last rollout."""
    if interval is None:
        return False
    if num_rollout is not None and rollout_id == num_rollout - 1:
        return True
    step = rollout_id + 1
    return step % interval == 0 or bool(num_rollout_per_epoch and step % num_rollout_per_epoch == 0)


def exec_command(command: str, capture_output: bool = False) -> str | None:
    """Run a line of bash; CalledProcessError if it fails."""
    done = subprocess.run(["bash", "-c", command], check=True, text=True, capture_output=capture_output)
    return done.stdout if capture_output else None


def get_free_port(start_port: int = 10000, consecutive: int = 1) -> int:
    """Return the first of `consecutive` neighbouring ports that were just free, from `start_port` up."""
    for port in range(start_port, 65536 - consecutive + 1):
        if all(map(is_port_available, range(port, port + consecutive))):
            return port
    raise OSError(f"no {consecutive} neighbouring free ports from {start_port} up")


def encode_int32_meta_array(values: np.ndarray) -> str:
    """Encode as base64: a third more than the bytes; JSON numbers take two or three times as much."""
    return base64.b64encode(np.ascontiguousarray(values, dtype=np.int32).tobytes()).decode()


def decode_int32_meta_array(value: Any) -> np.ndarray:
    """Decode an int32 array that an engine sent: base64 text, bytes, or a list of numbers."""
    if isinstance(value, str):
        value = base64.b64decode(value)
    if isinstance(value, (bytes, bytearray)):
        return np.frombuffer(value, dtype=np.int32)
    return np.asarray(value, dtype=np.int32)
