"""What the tests of trainers share. Heavy imports stand in the
fixtures, so that collecting tests is quick.
"""

import pytest


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """A folder with a tiny random model, which no test changes."""
    from tiny_model import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def process_group():
    """A group of this one process: `pytestmark = pytest.mark.usefixtures("process_group")`."""
    import torch.distributed as dist
    from trainer_helpers import init_process_group

    init_process_group()
    yield
    dist.destroy_process_group()
