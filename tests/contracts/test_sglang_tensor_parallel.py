"""A real SGLang server with two ranks: pushes reach both, and its answers are the trainer's."""

from collections.abc import Iterator

import pytest
from devices import CLOSE
from engine_under_test import EngineUnderTest, largest_difference, plain_log_probs, small_sglang_plan
from live_ranks import push_from_ranks

from slime.engines.engine_process import EngineServer
from slime.utils.async_utils import run
from slime.utils.machine import shm
from slime.weight_sync.base import SenderOptions
from slime.weight_sync.transports import transport_of
from slime.weight_sync.verify import reload_and_compare

pytestmark = [pytest.mark.sglang, pytest.mark.slow]
PROMPT = [10, 20, 30, 40, 50]


@pytest.fixture(scope="module")
def server(tiny_folder, tmp_path_factory) -> Iterator[EngineUnderTest]:
    log = tmp_path_factory.mktemp("sglang") / "engine.log"
    server = EngineServer(small_sglang_plan("engine", tiny_folder, log, tensor_parallel=2))
    server.launch()
    try:
        yield EngineUnderTest(server.wait_ready(), tiny_folder, None, "")
    finally:
        server.stop()


def test_each_share_reads_what_the_trainer_rank_on_its_device_has_packed(
    server, tiny_folder, new_folder, new_model
):
    """As over CUDA IPC, but with the bytes themselves in place of handles: there is no device here to map."""
    run(server.control.pause("retract"))
    run(server.control.flush())
    run(server.control.begin_update())
    job = {"targets": [(server.url, [0, 1])], "version": "run:ipc", "model": str(new_folder)}
    reports = push_from_ranks(2, job)
    assert reports == [{"failures": {}, "num_tensors": len(new_model.state_dict())}] * 2
    run(server.control.end_update())
    run(server.control.resume())
    made = server.generate(PROMPT, max_new_tokens=30, ignore_eos=True)
    assert made.weight_version == "run:ipc"
    assert largest_difference(made.log_probs, plain_log_probs(new_model, PROMPT, made.ids)) < CLOSE
    assert run(reload_and_compare(server.control, new_folder, "again")) == []
    run(server.control.update_from_disk(str(tiny_folder), "default"))


@pytest.mark.parametrize("name", ["http_tensor", "disk"])
def test_a_push_reaches_both_shares(server, tiny_folder, new_folder, new_model, tmp_path, name):
    options, transport = (
        SenderOptions(shm.make_prefix(), tmp_path / "weights", str(tiny_folder)),
        transport_of(name),
    )
    sender = transport.make_sender(options)
    items = list(new_model.state_dict().items())
    for bucket in (items[: len(items) // 2], items[len(items) // 2 :]):
        sender.send(bucket)
    bundle = sender.finish(f"run:{name}")
    info = run(server.control.info())
    assert info.num_ranks == 2
    before = run(server.control.checksums())
    assert {key.partition(":")[0] for key in before} == {"0", "1"}
    run(server.control.pause("retract"))
    run(server.control.flush())
    run(transport.deliver(bundle, server.control, info))
    run(server.control.resume())
    made = server.generate(PROMPT, max_new_tokens=30, ignore_eos=True)
    assert made.weight_version == f"run:{name}"
    assert largest_difference(made.log_probs, plain_log_probs(new_model, PROMPT, made.ids)) < CLOSE
    assert run(reload_and_compare(server.control, new_folder, "again")) == []
    run(server.control.update_from_disk(str(tiny_folder), "default"))
    sender.close()
    shm.unlink_prefix(options.shm_prefix)


def test_a_push_restores_both_shares_after_they_were_overwritten(server, tiny_folder, old_model, tmp_path):
    options, transport = (
        SenderOptions(shm.make_prefix(), tmp_path, str(tiny_folder)),
        transport_of("http_tensor"),
    )
    sender = transport.make_sender(options)
    sender.send(list(old_model.state_dict().items()))
    bundle, info = sender.finish("run:1"), run(server.control.info())
    assert info.can_be_overwritten
    loaded = run(server.control.checksums())
    run(server.control.pause("retract"))
    run(server.control.overwrite_weights())
    run(server.control.flush())
    noise = run(server.control.checksums())
    assert all(noise[name] != value for name, value in loaded.items())
    run(transport.deliver(bundle, server.control, info))
    assert run(server.control.checksums()) == loaded
    run(server.control.resume())
    made = server.generate(PROMPT, max_new_tokens=30, ignore_eos=True)
    assert largest_difference(made.log_probs, plain_log_probs(old_model, PROMPT, made.ids)) < CLOSE
    run(server.control.update_from_disk(str(tiny_folder), "default"))
    sender.close()
    shm.unlink_prefix(options.shm_prefix)
