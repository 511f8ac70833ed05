"""Disks that a test can fill or that cannot be written to: mounts, where this machine permits them."""

import contextlib
import subprocess

import pytest


@contextlib.contextmanager
def mounted(folder, *options):
    """A tmpfs at `folder`; the test is skipped where mounting is not permitted."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", ",".join(options), "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("mounting needs rights that this machine does not give")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
