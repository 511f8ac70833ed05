"""What several modules of these tests share."""

import pytest

from slime.engines import balancer


@pytest.fixture(params=["socket", "own loop"])
def way(request, monkeypatch):
    """How requests come to the balancer: by its socket, or handed over on its own loop."""
    if request.param == "socket":
        monkeypatch.setattr(balancer, "forwards_here", lambda *_: None)
    return request.param
