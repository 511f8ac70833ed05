"""The worker process that runs the graded program; it has neither the tests nor the secret.

The text of this file is sent to the sandbox after `grader_values.py`. `grader.py` starts it, sends the
program and, for each test, the names that the test uses. Every test has a fork of its own. Whatever the
program does to this process, it can only change the values that it sends, which are compared elsewhere.
"""

from __future__ import annotations

import builtins
import os
import sys
import types

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from slime.agent.rewards.grader_values import decode, encode, receive, send


class Worker:
    """One run of the program: looks up names, calls functions and keeps objects for the grader."""

    def __init__(self, requests: int, replies: int):
        self.requests, self.replies = requests, replies
        self.objects: list[Any] = []

    def pack(self, value: Any) -> Any:
        return encode(value, self.keep)

    def unpack(self, text: Any) -> Any:
        return decode(text, self.find)

    def keep(self, value: Any) -> list[Any]:
        if value is NotImplemented:
            return ["notimplemented"]
        if isinstance(value, type):
            if issubclass(value, BaseException):
                return ["error", ancestors(value)]
            name = str(getattr(value, "__name__", ""))
            if getattr(builtins, name, None) is value:
                return ["builtin", name]
        self.objects.append(value)
        return ["ref", len(self.objects) - 1]

    def find(self, text: list[Any]) -> Any:
        tag, what = text
        if tag == "ref":
            return self.objects[what]
        if tag == "callback":
            return lambda *args: self.call_back(what, args)
        return getattr(builtins, what)

    def call_back(self, number: int, args: tuple[Any, ...]) -> Any:
        """Call a function of the test, which runs in the grader."""
        send(self.replies, ["callback", number, [self.pack(arg) for arg in args]])
        reply = receive(self.requests, nothing)
        if reply[0] == "raise":
            raise getattr(builtins, reply[1], Exception)(reply[2])
        return self.unpack(reply[1])

    def answer(self, request: list[Any]) -> list[Any]:
        operation, target, *rest = request
        args: list[Any] = []
        if operation == "names":
            space = self.run(target)
            found = [name for name in rest[0] if name in space or name in rest[1]]
            return [
                "value",
                [[name, self.pack(space.get(name, getattr(builtins, name, None)))] for name in found],
            ]
        thing = self.objects[target]
        if operation == "attribute":
            value = getattr(thing, rest[0])
        elif operation == "assign":
            setattr(thing, rest[0], self.unpack(rest[1]))
            value = None
        elif operation == "content":
            value = [ancestors(type(thing)), dict(getattr(thing, "__dict__", {}))]
        elif operation == "isinstance":
            value = isinstance(thing, self.objects[rest[0]])
        else:
            args = [self.unpack(arg) for arg in rest[0]]
            value = thing(*args, **{name: self.unpack(arg) for name, arg in rest[1].items()})
        return ["value", self.pack(value), [self.pack(arg) for arg in args]]

    def run(self, program: str) -> dict[str, Any]:
        module = types.ModuleType("answer")
        sys.modules["answer"] = module
        exec(compile(program, "answer", "exec", dont_inherit=True), module.__dict__)
        return module.__dict__

    def serve(self) -> None:
        while True:
            request = receive(self.requests, nothing)
            if request[0] == "end":
                return
            try:
                reply = self.answer(request)
            except BaseException as error:
                reply = ["raise", ancestors(type(error)), str(error)[:1000]]
            send(self.replies, reply)


def ancestors(kind: type) -> list[str]:
    return [one.__name__ for one in type.mro(kind)]


def nothing() -> None:
    pass


def work() -> None:
    """Fork for every test. A fork that ended is reported, so that a program that exits is noticed at once."""
    requests, replies = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    send(replies, ["ready"])
    while True:
        try:
            receive(requests, nothing)
        except EOFError:
            return
        pid = os.fork()
        if pid == 0:
            try:
                Worker(requests, replies).serve()
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        send(replies, ["ended"])
