"""What a run that has just begun does where an engine is lost at once."""

from types import SimpleNamespace

import pytest

from slime.cluster.serving.engine_plane import EnginePlane
from slime.utils.errors import RunStopped
from slime.utils.http_utils import HttpError


def test_an_engine_that_is_lost_before_it_is_asked_ends_the_start_with_one_line(tmp_path):
    def gone(url):
        raise HttpError(0, "no response after 1 attempts", f"{url}/server_info")

    plane = object.__new__(EnginePlane)
    plane.weights, plane._run = SimpleNamespace(info=gone), SimpleNamespace(run_dir=tmp_path)
    plane._policy = plane._fleet = SimpleNamespace(
        servers=[SimpleNamespace(url="http://a:1", transports=set)]
    )
    with pytest.raises(RunStopped, match=f"http://a:1/server_info: no response .* log is in {tmp_path}/logs"):
        print(plane.transports)
