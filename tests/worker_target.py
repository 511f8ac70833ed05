"""What the tests of runtimes put into workers; it imports nothing that takes long."""

import os
import signal
import threading
import time


class Target:
    """Lives in a worker."""

    def __init__(self, base):
        self.base = base
        self.event = threading.Event()

    def add(self, x):
        return self.base + x

    def numbers(self):
        return [1, 2, 3]

    def pid(self):
        return os.getpid()

    def say(self, words):
        print(words, flush=True)
        return os.getpid()

    def env(self, name):
        return os.environ.get(name)

    def fail(self):
        raise ValueError("--flag 3: too small")

    def wait(self):
        self.event.wait(300)
        self.event.clear()
        return "woken"

    def wake(self):
        self.event.set()

    def total(self, ref):
        return sum(ref.load())

    def spin(self, seconds):
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            pass
        return "spun"

    def fork(self):
        """A child that has all files of the worker, and stays."""
        child = os.fork()
        if child == 0:
            time.sleep(300)
            os._exit(0)
        return child

    def die(self):
        os.kill(os.getpid(), signal.SIGKILL)


class Unreadable:
    """Can be sent, and not received."""

    def __reduce__(self):
        return _refuse, (os.getpid(),)


def _refuse(sender):
    if os.getpid() != sender:
        raise ValueError("unreadable here")
