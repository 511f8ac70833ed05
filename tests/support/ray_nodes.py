"""Two Ray nodes on this machine, with addresses of their own: what the tests of several machines run on."""

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest

T = TypeVar("T")
SECOND_HOST, THIRD_HOST = "127.0.0.2", "127.0.0.3"


@contextlib.contextmanager
def two_ray_nodes(num_gpus: int = 0) -> Iterator[str]:
    """Yields the address of the cluster. GPUs are there as far as Ray's books go."""
    with ray_cluster(num_gpus) as (cluster, _):
        yield cluster.address


@contextlib.contextmanager
def ray_cluster(num_gpus: int = 0) -> Iterator[tuple[Any, Any]]:
    """Yields Ray's own object, which loses and adds nodes, and the second node."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    # Ray notes its newest cluster in this folder, and whoever names none
    # joins that: other runs must not find ours.
    folder = tempfile.mkdtemp(prefix="nodes-")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RAY_TMPDIR", folder)
        environment.delenv("CUDA_VISIBLE_DEVICES", raising=False)  # else Ray's books would have those alone
        cluster = _started(lambda: Cluster(True, head_node_args={"num_cpus": 1, "num_gpus": num_gpus}))
        second = {"num_cpus": 1, "num_gpus": num_gpus, "node_ip_address": SECOND_HOST}
        try:
            yield cluster, _started(lambda: cluster.add_node(**second))
        finally:
            cluster.shutdown()
            shutil.rmtree(folder, ignore_errors=True)


def _started(start: Callable[[], T]) -> T:
    """Ray gives a node 30 s to start, which a busy machine may need more than once."""
    for _ in range(3):
        with contextlib.suppress(Exception):  # Ray has no class for it
            return start()
    return start()
