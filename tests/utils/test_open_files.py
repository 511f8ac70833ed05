"""A process raises its limit of open files to what the system allows."""

import subprocess
import sys

_ASK = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (200, 400))
from slime.utils.machine.open_files import most_requests, raise_limit
print(most_requests(), raise_limit(), most_requests(), most_requests(files_each=2))
"""


def test_a_process_takes_what_the_system_allows_it():
    done = subprocess.run([sys.executable, "-c", _ASK], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["100", "400", "272", "136"]
