"""What the tests of runtimes put into workers; it imports nothing that takes long."""

import ctypes
import logging
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


class Unmade:
    """Its constructor fails, with a thread of its own that stays, as of an actor that waits for others."""

    def __init__(self):
        threading.Thread(target=threading.Event().wait, name="stays").start()
        raise ValueError("--timeouts host=5: host1 did not answer")

    def add(self, x):
        return x


class Reporting:
    """Logs what a person at the driver's terminal should see."""

    def evict(self):
        logging.getLogger("slime.engines.fleet").error("engine-1 is evicted: %s", "no weights")
        logging.getLogger("slime.engines.fleet").warning("engine-1 is restarted")
        logging.getLogger("some.library").warning("not of ours")


class SlowToMake(Target):
    """Its constructor holds Python's lock for longer than a worker may be silent, as an import may."""

    def __init__(self, seconds):
        super().__init__(10)
        ctypes.PyDLL(None).usleep(int(seconds * 1e6))
