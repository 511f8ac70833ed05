"""Which value the cursor shows of a run that ended before another: none, and not its last one."""

import shutil
import subprocess
from pathlib import Path

import pytest

import slime.dashboard

MODULE = Path(slime.dashboard.__file__).parent / "static" / "js" / "hover.js"
PROGRAM = """
const { nearest } = await import("data:text/javascript," + encodeURIComponent(process.argv[1]));
const short = [0.1, undefined, 0.3, undefined, undefined];
console.log(JSON.stringify([0, 1, 2, 3, 4].map((at) => nearest(short, at))));
console.log(JSON.stringify([0, 1, 2].map((at) => nearest([undefined, 0, null], at))));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_a_curve_has_no_value_to_the_right_of_its_end():
    command = ["node", "--input-type=module", "-e", PROGRAM, MODULE.read_text()]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.stdout.splitlines() == ["[0,0,2,null,null]", "[null,1,null]"], ended.stderr
