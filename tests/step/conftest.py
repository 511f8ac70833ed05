"""What every test of a training step needs: a tiny model, and the process group of one rank."""

import pytest


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    from tiny_model import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module", autouse=True)
def process_group():
    import torch.distributed as dist
    from trainer_helpers import init_process_group

    init_process_group()
    yield
    dist.destroy_process_group()
