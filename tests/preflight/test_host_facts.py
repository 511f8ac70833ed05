"""Which of several hosts differs from the others, and how it is named."""

from dataclasses import replace

import pytest

from slime.preflight.host_facts import HostFacts, compare_hosts, host_facts, host_lines

USUAL = HostFacts(
    {"python": "3.12", "torch": "2.11.0"}, 1000.0, {"/tmp": 1 << 40}, "eth0", "25 Gb/s", "no GPU"
)


def found(**differing):
    facts = {"host0": USUAL, "host1": USUAL, "host2": replace(USUAL, **differing)}
    return [(one.kind, str(one)) for one in compare_hosts(facts, (999.0, 1001.0))]


def test_hosts_that_are_alike_are_not_mentioned():
    assert found(clock=1004.0) == []


@pytest.mark.parametrize(
    ("differing", "kind", "text"),
    [
        (
            {"versions": {"python": "3.12", "torch": "2.13.0"}},
            "error",
            "version of torch: 2.13.0, and 2 other",
        ),
        ({"versions": {"python": "3.12"}}, "error", "version of torch: none, and 2 other hosts have 2.11.0"),
        ({"clock": 4601.0}, "warning", "its clock is 3600 s off the driver's"),
        ({"room": {"/tmp": 1 << 20}}, "warning", "/tmp has 1 MiB left"),
        (
            {"wrong_interface": "GLOO_SOCKET_IFNAME=ib0"},
            "error",
            "GLOO_SOCKET_IFNAME=ib0: this host has no such interface",
        ),
        ({"speed": "1 Gb/s"}, "warning", "network: 1 Gb/s, and 2 other hosts have 25 Gb/s"),
    ],
)
def test_the_odd_one_out_is_named(differing, kind, text):
    [(how, said)] = found(**differing)
    assert how == kind and said.startswith("host2: ") and text in said


def test_a_head_without_gpus_or_cuda_is_no_odd_one():
    on_gpus = {"versions": {**USUAL.versions, "CUDA": "12.8", "NCCL": "2.27.3"}, "devices": "8 x NVIDIA H200"}
    assert found(**on_gpus) == []


def test_the_interfaces_of_ranks_are_those_of_the_host_unless_the_user_has_set_others(monkeypatch):
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)

    def seen(**env):
        facts = host_facts("127.0.0.1", [], env)
        return facts.interface, facts.wrong_interface

    assert seen() == ("lo", None)
    assert seen(GLOO_SOCKET_IFNAME="ib9") == ("ib9 (NCCL: =lo)", "GLOO_SOCKET_IFNAME=ib9")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib,eth")
    assert seen() == ("lo (NCCL: ib,eth)", None)
    assert seen(NCCL_SOCKET_IFNAME="=lo") == ("lo", None)


def test_this_host_says_what_it_is(tmp_path):
    facts = host_facts("127.0.0.1", [str(tmp_path), str(tmp_path / "missing")], {})
    assert facts.interface == "lo" and set(facts.versions) >= {"python", "torch", "transformers"}
    assert str(tmp_path) in facts.room and str(tmp_path / "missing") not in facts.room
    first, last = host_lines({"host0": facts})
    assert first.startswith("  host0: ") and "GiB free" in first and "torch" in last
