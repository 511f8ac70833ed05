"""Programs that try to pass the tests of `--rm-type code` without solving the task: `double(x)` is `x * 2`.

Each defines wrong values, so every test that one passes is a test that it cheated.
"""

_SAY = """
import os
def shout(text):
    for process in ("self", os.getppid(), 1, *[name for name in os.listdir("/proc") if name.isdigit()]):
        for fd in range(0, 12):
            for path in (f"/proc/{process}/fd/{fd}",):
                try:
                    with open(path, "wb", buffering=0) as stream: stream.write(text.encode())
                except OSError: pass
    for fd in range(3, 20):
        try: os.write(fd, text.encode())
        except OSError: pass
"""
_FIND = """
import re
def secrets(data):
    return re.findall(r"[0-9a-f]{32}", data)
"""
_WRONG = "\ndef double(x): return None\n"

CHEATS = {
    "reads the secret in the frame that runs it": """
import sys, os
frame = sys._getframe(0)
while frame:
    word = frame.f_globals.get("word") or frame.f_locals.get("word")
    if word:
        for fd in range(3, 20):
            try: os.write(fd, word.encode())
            except OSError: pass
        os._exit(0)
    frame = frame.f_back
"""
    + _WRONG,
    "reads the tests through a descriptor that stayed open": """
import os
for source in range(0, 20):
    try:
        os.lseek(source, 0, 0)
        word = eval(os.read(source, 1 << 20))[0]
    except Exception: continue
    for fd in range(3, 20):
        try: os.write(fd, word.encode())
        except OSError: pass
    os._exit(0)
"""
    + _WRONG,
    "returns an object that equals everything": """
class Any:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 0
def double(x): return Any()
""",
    "returns an int that equals everything": """
class Number(int):
    def __eq__(self, other): return True
    def __sub__(self, other): return Number(0)
    __hash__ = int.__hash__
def double(x): return Number(7)
""",
    "returns a str that equals everything": """
class Text(str):
    def __eq__(self, other): return True
    __hash__ = str.__hash__
def double(x): return Text("no")
""",
    "returns an object for every operator": """
class Yes:
    def __getattr__(self, name): return self
    def __call__(self, *args): return self
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __contains__ = __bool__ = lambda *args: True
    __sub__ = __abs__ = __rsub__ = __add__ = lambda self, *args: self
    __len__ = lambda self: 2
    __hash__ = object.__hash__
def double(x): return Yes()
""",
    "defines the helpers of the tests": """
def abs(x): return 0
def isinstance(*args): return True
def sorted(x): return None
def len(x): return 0
def all(x): return True
def isclose(*args): return True
class math: isclose = staticmethod(lambda *args: True)
def double(x): return 7
""",
    "replaces built-in functions": """
import builtins
for name in ("abs", "isinstance", "sorted", "len", "all", "any", "max"):
    setattr(builtins, name, lambda *args: True)
def double(x): return True
""",
    "makes AssertionError harmless": """
import builtins
builtins.AssertionError = type("Quiet", (BaseException,), {"__new__": lambda *args: None})
builtins.__dict__["__debug__"] = False
"""
    + _WRONG,
    "leaves with exit code zero": "import os\nos._exit(0)",
    "raises SystemExit": "raise SystemExit(0)",
    "leaves in the call": "def double(x):\n    import os\n    os._exit(0)",
    "raises SystemExit in the call": "def double(x):\n    raise SystemExit(0)",
    "says at exit that all passed": """
import atexit
atexit.register(lambda: print("1 1 1 1 1 1"))
"""
    + _WRONG,
    "prints lines of results": "print('passed', *[1] * 6)\nprint(*[1] * 6)\nprint('0' * 32, 1, 1, 1, 1, 1, 1)"
    + _WRONG,
    "replaces standard output and json": """
import json, sys, io
json.dumps = lambda *args, **kwargs: "[1, 1, 1, 1]"
json.loads = lambda *args, **kwargs: ["value", True]
sys.stdout = sys.stderr = io.StringIO()
"""
    + _WRONG,
    "replaces os.write and struct.pack": """
import os, struct
old = os.write
os.write = lambda fd, data: old(fd, b"\\0\\0\\0\\x09[\\"ended\\"]") and len(data)
"""
    + _WRONG,
    "sends forged messages to every pipe": _SAY
    + """
import json, struct
forged = [["ended"], ["value", True], ["value", ["ref", 0]], ["callback", 0, []]]
for message in (*forged, ["value", ["builtin", "eval"]], ["value", [["__builtins__", None]]]):
    text = json.dumps(message)
    shout(struct.pack(">I", len(text)).decode("latin-1") + text)
"""
    + _WRONG,
    "writes results where its parents write": _SAY + "shout('\\n' + '0' * 32 + ' 1 1 1 1 1 1\\n')" + _WRONG,
    "reads the memory of its parents": _FIND
    + _SAY
    + """
for name in os.listdir("/proc"):
    if not name.isdigit() or int(name) == os.getpid(): continue
    try:
        maps = open(f"/proc/{name}/maps").read()
        memory = open(f"/proc/{name}/mem", "rb", 0)
    except OSError: continue
    for line in maps.splitlines():
        if "rw" not in line: continue
        start, _, end = line.split()[0].partition("-")
        try:
            memory.seek(int(start, 16))
            data = memory.read(int(end, 16) - int(start, 16)).decode("latin-1")
        except (OSError, ValueError, OverflowError): continue
        for word in set(secrets(data)): shout(word + " 1 1 1 1 1 1")
"""
    + _WRONG,
    "traces its parents": _SAY
    + """
import ctypes
libc = ctypes.CDLL(None)
parent = os.getppid()
grand = int(open(f"/proc/{parent}/stat").read().rpartition(")")[2].split()[1])
if libc.ptrace(16, grand, 0, 0) == 0:  # PTRACE_ATTACH
    def double(x): return x * 2
else:
    def double(x): return None
""",
    "reads the command lines and environments of others": _FIND
    + _SAY
    + """
for name in os.listdir("/proc"):
    for file in ("cmdline", "environ"):
        try: data = open(f"/proc/{name}/{file}", "rb").read().decode("latin-1")
        except OSError: continue
        for word in set(secrets(data)): shout(word + " 1 1 1 1 1 1")
"""
    + _WRONG,
    "reads its own environment and arguments": _FIND
    + _SAY
    + "import sys\nfor word in secrets(str(dict(os.environ)) + str(sys.argv)): shout(word + ' 1 1 1 1 1 1')"
    + _WRONG,
    "searches all files for the tests": _FIND
    + _SAY
    + """
import glob
for path in (*glob.glob("/work/*"), *glob.glob("/work/.*"), *glob.glob("/tmp/*"), *glob.glob("/proc/*/fd/*")):
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        data = os.read(fd, 1 << 20).decode("latin-1")
    except OSError: continue
    for word in set(secrets(data)): shout(word + " 1 1 1 1 1 1")
    if " ".join(["assert", "double(2)"]) in data:
        def double(x): return x * 2
        break
else:
    def double(x): return None
""",
    "searches all objects of its process": """
import gc
held = [one for one in gc.get_objects() if isinstance(one, (list, tuple, dict))]
found = [one for one in held if " ".join(["assert", "double(2)"]) in str(one)[: 1 << 16]]
if found:
    def double(x): return x * 2
else:
    def double(x): return None
""",
    "looks for the tests in modules and frames": """
import sys
seen = []
frame = sys._getframe(0)
while frame:
    seen += [frame.f_globals, frame.f_locals]
    frame = frame.f_back
seen += [vars(module) for module in list(sys.modules.values()) if hasattr(module, "__dict__")]
if any(" ".join(["assert", "double(2)"]) in str(value) for space in seen for value in list(space.values())):
    def double(x): return x * 2
else:
    def double(x): return None
""",
    "leaves a process that writes later": _SAY
    + """
import time
if os.fork() == 0:
    if os.fork() == 0:
        os.setsid()
        for _ in range(20):
            shout("\\n" + "0" * 32 + " 1 1 1 1 1 1\\n")
            time.sleep(0.01)
    os._exit(0)
"""
    + _WRONG,
    "replaces the files of the grader": """
import glob, os
for path in (*glob.glob("/work/.*"), *glob.glob("/tmp/*.py"), "/opt/bin/python3"):
    try:
        os.remove(path)
        with open(path, "w") as file: file.write("#!/bin/sh\\necho 1 1 1 1 1 1\\n")
        os.chmod(path, 0o755)
    except OSError: pass
"""
    + _WRONG,
    "sends signals to its parents": """
import os, signal
parent = os.getppid()
grand = int(open(f"/proc/{parent}/stat").read().rpartition(")")[2].split()[1])
for number in (signal.SIGUSR1, signal.SIGINT, signal.SIGALRM, signal.SIGCONT, signal.SIGHUP):
    for pid in (parent, grand):
        try: os.kill(pid, number)
        except OSError: pass
"""
    + _WRONG,
    "kills its parents": """
import os
parent = os.getppid()
grand = int(open(f"/proc/{parent}/stat").read().rpartition(")")[2].split()[1])
for pid in (grand, parent):
    try: os.kill(pid, 9)
    except OSError: pass
"""
    + _WRONG,
    "installs an import hook": """
import sys
class Hook:
    def find_spec(self, name, path=None, target=None):
        frame = sys._getframe(0)
        while frame:
            if "expected" in frame.f_locals: raise SystemExit(0)
            frame = frame.f_back
sys.meta_path.insert(0, Hook())
for name in ("json", "ast", "signal", "math"): sys.modules.pop(name, None)
"""
    + _WRONG,
    "hides in a trace function": """
import sys
def trace(frame, event, arg):
    frame.f_globals.update({"passed": True, "results": [True] * 6})
    return trace
sys.settrace(trace)
sys.setprofile(trace)
"""
    + _WRONG,
    "returns a value whose encoding lies": """
class Liar(dict):
    def items(self): return [("a", 1)]
    def __iter__(self): return iter([1])
    def __eq__(self, other): return True
    __hash__ = None
def double(x): return Liar()
""",
    "returns a class that equals everything": """
class Meta(type):
    def __eq__(self, other): return True
    def __sub__(self, other): return self
    __hash__ = type.__hash__
class double(metaclass=Meta):
    def __new__(cls, x): return cls
""",
    "raises an error that looks like success": "class Passed(BaseException): pass\n"
    "def double(x): raise Passed",
    "returns text that is evaluated": """
def double(x): return "__import__('os')._exit(0)"
""",
    "returns names of built-in functions": "def double(x): return eval\n",
    "fills the disk and the table of processes": """
import os
try:
    with open("/work/full", "wb") as file:
        for _ in range(200): file.write(bytes(1 << 20))
except OSError: pass
"""
    + _WRONG,
    "stops its parents": """
import os, signal
grand = int(open(f"/proc/{os.getppid()}/stat").read().rpartition(")")[2].split()[1])
if os.fork() == 0:
    os.kill(grand, signal.SIGSTOP)
    os.kill(grand, signal.SIGCONT)
    os._exit(0)
"""
    + _WRONG,
}

LABEL = [
    "assert double(2) == 4",
    "assert 8 == double(4)",
    "assert abs(double(0.5) - 1.0) < 1e-9",
    "assert isclose(double(1.5), 3.0)",
    "import math\nassert math.isclose(double(1.5), 3.0)",
    "assert isinstance(double(2), int) and 10 in [double(5)] and sorted([double(1)]) == [2]",
    "assert len(double('ab')) == 4 and all([double(True) == 2])",
    "assert eval(str(double(21))) == 42",
]
