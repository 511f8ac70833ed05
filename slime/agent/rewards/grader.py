"""The grader process: it holds the tests and a secret, and never runs code of the graded program.

The text of this file is sent to the sandbox after that of `grader_values.py`. The program runs in another
process (`grader_worker.py`) that is not forked from this one. Names of the program that a test uses are
proxies here: a call travels through a pipe, and what comes back is content of built-in types, which the test
itself compares. No other process of the same user can trace this one or open its descriptors or memory.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import ctypes
import importlib
import json
import os
import select
import signal
import sys
import time
import types

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from slime.agent.rewards.grader_values import decode, encode, receive, send

# What tests use for comparing, without importing it: taken from here, never from the program.
HELPERS = {
    "math": ("isclose", "sqrt", "ceil", "floor", "inf", "nan", "pi", "factorial", "gcd", "comb"),
    "collections": ("Counter", "OrderedDict", "defaultdict", "deque", "namedtuple"),
    "itertools": ("chain", "combinations", "islice", "permutations", "product", "takewhile"),
    "functools": ("partial", "reduce"),
    "copy": ("deepcopy",),
    "fractions": ("Fraction",),
    "decimal": ("Decimal",),
    "typing": (
        "Any",
        "Callable",
        "Dict",
        "Iterable",
        "List",
        "Optional",
        "Sequence",
        "Set",
        "Tuple",
        "Union",
    ),
}
MODULES = {"np": "numpy", "pd": "pandas", **{name: name for name in (*HELPERS, "numpy", "re", "random")}}
MODULES.update({name: name for name in ("json", "string", "datetime", "heapq", "statistics", "operator")})
OF_HELPERS = {name: module for module, names in HELPERS.items() for name in names}
EVALUATE = ("eval", "exec", "compile")  # text of the program may reach them: they run in its process
BINARY = ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "divmod", "pow", "and", "xor", "or")
UNARY = ("neg", "pos", "abs", "invert", "round", "index", "int", "float", "complex", "len", "str", "repr")
OTHERS = ("getitem", "setitem", "delitem", "iter", "next", "enter", "exit", "reversed", *UNARY)
START_S = 60.0
IGNORED = (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


class Failed(BaseException):
    """The test failed: its program ended, sent an invalid message, or took too long."""


class Remote:
    """An object of the program, which stays in its process.

    Two such objects are equal if their classes and contents are equal. Calling the program's own comparison
    would let an object be equal to everything.
    """

    __slots__ = ("_link", "_number")

    def __init__(self, link: Link, number: int):
        object.__setattr__(self, "_link", link)
        object.__setattr__(self, "_number", number)

    def __getattr__(self, name: str) -> Any:
        return self._link.ask("attribute", self._number, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._link.ask("assign", self._number, name, self._link.pack(value))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Remote):
            return False
        if self._number == other._number:
            return True
        return bool(self._link.ask("content", self._number) == self._link.ask("content", other._number))

    def __hash__(self) -> int:
        return hash(self._number)

    def __instancecheck__(self, value: Any) -> bool:
        return type(value) is Remote and bool(self._link.ask("isinstance", value._number, self._number))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._link.call(self._number, args, kwargs)


def _forward(name: str) -> Any:
    def method(self: Remote, *args: Any) -> Any:
        try:
            bound = self._link.ask("attribute", self._number, name)
        except AttributeError:
            raise TypeError(f"an object of the program has no {name}") from None
        return bound(*args)

    return method


for _name in (*BINARY, *(f"r{name}" for name in BINARY), *OTHERS):
    setattr(Remote, f"__{_name}__", _forward(f"__{_name}__"))


class Link:
    """The pipe to one worker process, and the messages exchanged with it."""

    def __init__(self, worker: str):
        requests, self.requests = os.pipe()
        self.replies, replies = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            for number in IGNORED:
                signal.signal(number, signal.SIG_DFL)
            os.dup2(requests, 0)
            os.dup2(replies, 1)
            os.execv(sys.executable, [sys.executable, "-I", "-c", worker])
        os.close(requests)
        os.close(replies)
        self.deadline = time.monotonic() + START_S
        self.remotes: dict[int, Remote] = {}
        self.callbacks: list[Any] = []
        self.errors: dict[str, type[BaseException]] = {}
        self.hear()  # it is ready: starting an interpreter takes no time from the first test

    def close(self) -> None:
        for kill, target in ((os.killpg, self.pid), (os.kill, self.pid)):
            with contextlib.suppress(OSError):
                kill(target, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self.requests)
        os.close(self.replies)

    def begin(self, deadline: float) -> None:
        self.deadline = deadline
        self.remotes.clear()
        self.callbacks.clear()

    def wait(self) -> None:
        left = self.deadline - time.monotonic()
        if left <= 0 or not select.select([self.replies], [], [], left)[0]:
            raise Failed("it took too long")

    def send_message(self, *request: Any) -> None:
        try:
            send(self.requests, list(request))
        except OSError:
            raise Failed("the program ended") from None

    def hear(self) -> list[Any]:
        try:
            return receive(self.replies, self.wait)
        except (EOFError, OSError, ValueError, RecursionError):
            raise Failed("the program ended, or sent an invalid message") from None

    def ask(self, *request: Any) -> Any:
        return self.exchange(request)[0]

    def exchange(self, request: tuple[Any, ...]) -> tuple[Any, list[Any]]:
        self.send_message(*request)
        while True:
            try:
                kind, *rest = self.hear()
                if kind == "value":
                    after = [self.unpack(arg) for arg in rest[1]] if len(rest) > 1 else []
                    return (rest[0] if request[0] == "names" else self.unpack(rest[0])), after
                if kind == "raise":
                    error = self.error(rest[0])(rest[1])
                elif kind == "callback":
                    args = [self.unpack(arg) for arg in rest[1]]
                    self.call_back(self.callbacks[rest[0]], args)
                    continue
                else:
                    raise Failed("the program ended")
            except (LookupError, ValueError, TypeError, AttributeError, OverflowError, RecursionError):
                raise Failed("the program sent an invalid value") from None
            raise error

    def call(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        packed = {name: self.pack(arg) for name, arg in kwargs.items()}
        value, after = self.exchange(("call", number, [self.pack(arg) for arg in args], packed))
        for before, now in zip(args, after):  # noqa: B905 - Python 3.8 has no strict
            if type(before) is type(now) and isinstance(now, (list, dict, set, bytearray)) and before != now:
                before.clear()
                before.extend(now) if isinstance(now, (list, bytearray)) else before.update(now)
        return value

    def call_back(self, function: Any, args: list[Any]) -> None:
        try:
            self.send_message("value", self.pack(function(*args)))
        except Exception as error:
            self.send_message("raise", type(error).__name__, str(error)[:1000])

    def pack(self, value: Any) -> Any:
        return encode(value, self.refer)

    def unpack(self, text: Any) -> Any:
        return decode(text, self.resolve)

    def refer(self, value: Any) -> list[Any]:
        if type(value) is Remote:
            return ["ref", value._number]
        name = str(getattr(value, "__name__", ""))
        if getattr(builtins, name, None) is value:
            return ["builtin", name]
        if isinstance(value, (types.FunctionType, types.BuiltinFunctionType, types.MethodType)):
            self.callbacks.append(value)
            return ["callback", len(self.callbacks) - 1]
        raise TypeError(f"a test cannot give the program a {type(value).__name__}")

    def resolve(self, text: list[Any]) -> Any:
        tag, *rest = text
        if tag == "ref":
            return self.remotes.setdefault(int(rest[0]), Remote(self, int(rest[0])))
        if tag == "error":
            return self.error(rest[0])
        if tag == "notimplemented":
            return NotImplemented
        found = getattr(builtins, rest[0])
        if tag != "builtin" or not isinstance(found, type):
            raise ValueError("no such value")
        return found

    def error(self, ancestors: list[str]) -> type[BaseException]:
        """Return the exception class of this name: a built-in one, or one made below its built-in base."""
        name = ancestors[0]
        known = [getattr(builtins, one, None) for one in ancestors]
        base = next(one for one in known if isinstance(one, type) and issubclass(one, BaseException))
        if base is known[0]:
            return base
        return self.errors.setdefault(name, type(name, (base,), {}))


def free_names(tree: ast.AST) -> list[str]:
    """Return the names that a test reads and does not define, those of inner expressions last."""
    defined, used = set(), []
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            used.append(node.id) if isinstance(node.ctx, ast.Load) else defined.add(node.id)
        elif isinstance(node, ast.arg):
            defined.add(node.arg)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            defined.add(node.name)
        elif isinstance(node, ast.alias):
            defined.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            defined.add(node.name)
    return [name for name in used if name not in defined]


def helper(name: str) -> Any:
    """Return what a test means by a name of the standard library; KeyError: it is none."""
    if hasattr(builtins, name):
        return getattr(builtins, name)
    if name in OF_HELPERS:
        return getattr(importlib.import_module(OF_HELPERS[name]), name)
    try:
        return importlib.import_module(MODULES[name])
    except ImportError:
        raise KeyError(name) from None


def passes(test: str, program: str, link: Link) -> bool:
    """Run one test; it passes when it comes to its end."""
    tree = ast.parse(test)
    names = free_names(tree)
    helpers = [name for name in names if hasattr(builtins, name) or name in OF_HELPERS or name in MODULES]
    helpers = [name for name in helpers if name not in EVALUATE]
    wanted = [name for name in names if name not in helpers]
    # A task may ask for a function that is called like a helper, such as `sum`: the innermost name of a test
    # that uses no other is the program's.
    wanted = wanted or helpers[-1:]
    link.send_message("test")
    found = link.ask("names", program, wanted, EVALUATE)
    space: dict[str, Any] = {"__name__": "test", "__builtins__": dict(vars(builtins))}
    for name in helpers:
        with contextlib.suppress(KeyError):
            space[name] = helper(name)
    try:
        space.update({name: link.unpack(value) for name, value in found if name in wanted})
    except (LookupError, ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        return False
    exec(compile(tree, "test", "exec", dont_inherit=True), space)
    return True


def grade(test: str, program: str, link: Link, seconds: float) -> tuple[bool, bool]:
    """Return whether a test passed, and whether its worker can be used for the next one."""
    late = []

    def end(*_: object) -> None:
        late.append(True)
        raise Failed("it took too long")

    link.begin(time.monotonic() + seconds)
    signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    passed = usable = False
    with contextlib.suppress(Failed):
        with contextlib.suppress(Exception, SystemExit, KeyboardInterrupt, GeneratorExit):
            passed = passes(test, program, link)
        link.send_message("end")
        usable = link.hear() == ["ended"]
    signal.setitimer(signal.ITIMER_REAL, 0)
    return passed and not late, usable and not late


def main(path: str) -> None:
    # PR_SET_DUMPABLE 0: processes of the same user can neither trace this one nor open what it has open.
    if ctypes.CDLL(None, use_errno=True).prctl(4, ctypes.c_ulong(0), 0, 0, 0) != 0:
        raise SystemExit("this sandbox cannot protect the grader from the program")
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    with open(path) as file:
        given = json.load(file)
    os.remove(path)
    report, null = os.dup(1), os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):  # a test may print
        os.dup2(null, fd)
    results, link = [], None
    for test in given["tests"]:
        link = link or Link(given["worker"])
        passed, usable = grade(test, given["program"], link, given["seconds"])
        results.append(passed)
        if not usable:
            link.close()
            link = None
    if link is not None:
        link.close()
    os.write(report, " ".join([given["word"], *(str(int(passed)) for passed in results)]).encode())
