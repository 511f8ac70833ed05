"""Commands run slime's own loops: a stranger's `train.py`
in the working folder or on the path is never imported.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import warm_start
from argument_helpers import base_argv

ROOT = Path(__file__).parents[2]
STRANGER = "print('the stranger ran')\n\n\ndef train(args): pass\n"
# Each loop refuses one flag before it starts anything, so its complaint tells that it was reached.
COMPLAINTS = {
    "train": (("--update-weights-interval", "2"), "--update-weights-interval: it needs"),
    "train-async": (("--colocate",), "--colocate: it makes engines and trainer take turns"),
}
AS_MODULE = ("-m", "slime")
AS_SCRIPT = ("-c", "import sys; from slime.cli.main import main; sys.exit(main())")


@pytest.mark.parametrize(
    "command, form, here",
    [
        ("train", AS_MODULE, True),
        pytest.param("train", AS_SCRIPT, False, marks=pytest.mark.slow),
        pytest.param("train-async", AS_MODULE, True, marks=pytest.mark.slow),
    ],
)
def test_a_strangers_train_py_is_never_imported(tmp_path, command, form, here):
    for name in ("train.py", "train_async.py"):
        (tmp_path / name).write_text(STRANGER)
    path = [str(ROOT)] if here else [str(tmp_path), str(ROOT)]
    words, complaint = COMPLAINTS[command]
    with warm_start.real_processes():
        done = subprocess.run(
            [sys.executable, *form, command, *base_argv(), *words, "--run-dir", str(tmp_path / "run")],
            capture_output=True,
            text=True,
            timeout=600,
            cwd=tmp_path if here else ROOT / "tests",
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path), "HF_HUB_OFFLINE": "1"},
        )
    assert "the stranger ran" not in done.stdout
    assert done.returncode == 2, done.stderr
    assert complaint in done.stderr
