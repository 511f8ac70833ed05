"""Decides whether a retry can help after an exception of a user function, and explains it if not.

Every retry repeats a mistake in the code (a missing key, a wrong type), so it ends the run at once, with the
file, the line and the subject of the call. Failures of the outside world (a judge that is down, a timeout, a
full disk) are temporary: the caller handles them.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import os
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from slime.utils.errors import EngineResponseError, RunStopped
from slime.utils.misc import load_function

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_LIBRARIES = tuple(
    {sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)
_OUTSIDE_WORLD = (OSError, TimeoutError, EOFError, MemoryError, EngineResponseError)
_NO_SUCH_FILE = (FileNotFoundError, NotADirectoryError, IsADirectoryError)  # permanent, like a path in code
_MISTAKES: tuple[type[BaseException], ...] = (
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    NameError,
    ArithmeticError,
    AssertionError,
)
_MISTAKES += (ImportError, SyntaxError, NotImplementedError, RecursionError)
_MODULES_OF_THE_WORLD = "http urllib ssl socket subprocess concurrent asyncio multiprocessing"
_MAX_LINE = 160


class PluginError(RunStopped):
    """A user function made a mistake that a retry would repeat."""


def may_pass(error: BaseException) -> bool:
    """Return whether an error is external, so that a retry may succeed: timeouts, connections, HTTP, the OS.

    Exception classes of libraries and users count as external, unless they derive from TypeError, ValueError
    and the like; a plain Exception or RuntimeError counts only if an external error caused it.
    """
    if isinstance(error, BaseExceptionGroup):
        return all(may_pass(one) for one in error.exceptions)
    if isinstance(error, _OUTSIDE_WORLD):
        return not isinstance(error, _NO_SUCH_FILE)
    if isinstance(error, _MISTAKES):
        return False
    module = type(error).__module__.partition(".")[0]
    if module not in sys.stdlib_module_names or module in _MODULES_OF_THE_WORLD.split():
        return True
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return cause is not None and may_pass(cause)


@contextlib.contextmanager
def plugin_call(
    option: str, path: str, subject: Callable[[], str] = str, *, keep: tuple[type[Exception], ...] = ()
) -> Iterator[None]:
    """Wrap a call of the function at `path`: its mistakes become a PluginError, other errors pass unchanged.

    `subject` names what the function was called for. `keep`: exceptions of slime that pass through it.
    """
    try:
        yield
    except (asyncio.CancelledError, GeneratorExit):
        raise
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
            raise  # Ctrl-C; in another thread the function itself raised it, and it would end the event loop
        passes = isinstance(error, (RunStopped, *keep)) or may_pass(error)
        if isinstance(error, Exception) and passes:
            raise
        raise PluginError(mistake(option, path, error, subject())) from error


def mistake(option: str, path: str, error: BaseException, subject: str = "") -> str:
    """Return the message about an exception of a user function."""
    kind, text = type(error).__name__, str(error)
    return _message(
        f"{option} {path} raised {kind}{': ' if text else ''}{text}", place_of(error, path), subject
    )


def wrong_return(option: str, path: str, complaint: str, subject: str = "") -> NoReturn:
    """Raise because the function returned a wrong value; `complaint`: what is wrong, and what is expected."""
    raise PluginError(_message(f"{option} {path} {complaint}", _definition_of(path), subject))


def place_of(error: BaseException, path: str) -> str:
    """Return where in the user's code the exception was raised: "file:line in function: source line"."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    frames = traceback.extract_tb(error.__traceback__)
    own_file = _file_of(path)
    own = [frame for frame in frames if frame.filename == own_file or is_users_code(frame.filename)]
    if not own:
        return _definition_of(path)
    frame = own[-1]
    place = f"{frame.filename}:{frame.lineno} in {frame.name}"
    return f"{place}: {frame.line[:_MAX_LINE]}" if frame.line else place


def _message(what: str, place: str, subject: str) -> str:
    lines = [what, *([f"  at {place}"] if place else []), *([f"  for {subject}"] if subject else [])]
    return "\n".join([*lines, "  A retry would fail in the same way, so the run stops here."])


def is_users_code(filename: str) -> bool:
    """Return whether a file belongs neither to slime nor to a library."""
    if f"{os.sep}site-packages{os.sep}" in filename or f"{os.sep}dist-packages{os.sep}" in filename:
        return False
    return not filename.startswith(("<frozen", _PACKAGE, *_LIBRARIES))


def _function_of(path: str) -> Callable[..., Any] | None:
    try:
        function = inspect.unwrap(load_function(path))
    except Exception:  # the message is then less detailed
        return None
    while isinstance(function, functools.partial):
        function = function.func
    return function if inspect.isroutine(function) or inspect.isclass(function) else type(function)


def _file_of(path: str) -> str | None:
    with contextlib.suppress(TypeError):  # there is no function, or it is not written in Python
        return inspect.getsourcefile(_function_of(path))  # type: ignore[arg-type]
    return None


def _definition_of(path: str) -> str:
    with contextlib.suppress(TypeError, OSError):  # as above
        return f"{_file_of(path)}:{inspect.getsourcelines(_function_of(path))[1]} (its definition)"  # type: ignore[arg-type]
    return ""
