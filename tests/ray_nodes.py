"""Two Ray nodes on this machine, with addresses of their own: what the tests of several machines run on."""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator

import pytest

SECOND_HOST = "127.0.0.2"


@contextlib.contextmanager
def two_ray_nodes(num_gpus: int = 0) -> Iterator[str]:
    """Yields the address of the cluster. GPUs are there as far as Ray's books go."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    # Ray notes its newest cluster in this folder, and whoever names none
    # joins that: other runs must not find ours.
    folder = tempfile.mkdtemp(prefix="nodes-")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RAY_TMPDIR", folder)
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": num_gpus})
        try:
            cluster.add_node(num_cpus=1, num_gpus=num_gpus, node_ip_address=SECOND_HOST)
            yield cluster.address
        finally:
            cluster.shutdown()
            shutil.rmtree(folder, ignore_errors=True)
