"""Every class behind a protocol has what it declares, and nobody asks for more than is declared."""

import ast
import typing
from pathlib import Path

import pytest
from protocol_checks import attributes_of, differences, members
from source_trees import nodes_of

import slime
from slime.agent.engine_access import EnginePolicy, Policy
from slime.agent.sandbox.base import Sandbox
from slime.agent.sandbox.daytona import DaytonaSandbox
from slime.agent.sandbox.e2b import E2BSandbox
from slime.agent.sandbox.local import LocalSandbox
from slime.arguments import PluginArgs
from slime.backends.base import OutputMatrix
from slime.backends.fsdp.backend import FSDPBackend
from slime.backends.shared.trainer_base import TrainBackend
from slime.catalog.trackers import TRACKERS
from slime.catalog.transports import TRANSPORTS
from slime.cluster.restart.recovery import GuardedFuture
from slime.cluster.rollout_workers import RolloutWorkers
from slime.cluster.serving.engine_host import HostedEngine
from slime.cluster.serving.served_model import Rotations
from slime.engines.balancer import Balancer
from slime.engines.embedded import weight_update as embedded_weights
from slime.engines.engine_process import EngineServer
from slime.engines.external import ExternalServer
from slime.engines.fleet import FleetServer, Rotation
from slime.engines.middleware import Middleware
from slime.engines.prefix_cache import PrefixCacheMiddleware
from slime.engines.sglang.router import SGLangRouter
from slime.liveness.hang_watch import Workers
from slime.liveness.heartbeat import Beating, HttpBeat, HttpServer
from slime.observability.trackers.base import Service
from slime.preflight import findings
from slime.preflight.run_plan import RunPlan
from slime.record.writer import RecordWriter
from slime.rollout import ledger
from slime.rollout.generation.policy_requests import PolicyRequests
from slime.rollout.workers.current import GroupRunner
from slime.rollout.workers.worker import RolloutWorker
from slime.runtime.base import Future, Ref, Runtime
from slime.runtime.local import LocalRuntime, ProcessHandle, SegmentRef
from slime.utils.http_utils import Observer
from slime.utils.machine.children import Child
from slime.utils.machine.warm_start import WarmChild
from slime.utils.misc import load_function
from slime.utils.types import ExpertArgs, RewardArgs
from slime.weight_sync.base import LiveSender, Sender
from slime.weight_sync.delta import publication
from slime.weight_sync.transports import live_sender_of, transport_of

PACKAGE = Path(slime.__file__).parent

IMPLEMENTATIONS: dict[type, list[type]] = {
    OutputMatrix: [typing.get_type_hints(FSDPBackend.output_matrix)["return"]],
    FleetServer: [EngineServer, HostedEngine, ExternalServer],
    HttpServer: [EngineServer, HostedEngine, ExternalServer],
    Rotation: [Balancer, SGLangRouter, Rotations],
    Middleware: [PrefixCacheMiddleware],
    Sender: sorted(
        {transport_of(name).make_sender for name, row in TRANSPORTS.items() if not row.live},
        key=lambda c: c.__name__,
    ),
    LiveSender: [live_sender_of(name) for name, row in TRANSPORTS.items() if row.live],
    publication.DeltaSource: [publication.FolderSource, publication.HttpSource],
    embedded_weights.Source: [
        embedded_weights.SharedMemorySource,
        embedded_weights.DiskSource,
        embedded_weights.GroupSource,
        embedded_weights.DequantizedSource,
    ],
    Service: [load_function(row.service) for row in TRACKERS.values()],
    RewardArgs: [PluginArgs],
    ExpertArgs: [PluginArgs],
    Observer: [PolicyRequests],
    Runtime: [LocalRuntime],
    Beating: [ProcessHandle, HttpBeat],
    Workers: [LocalRuntime],
    Child: [WarmChild],
    Ref: [SegmentRef],
    Future: [GuardedFuture],
    Sandbox: [LocalSandbox, E2BSandbox, DaytonaSandbox],
    Policy: [EnginePolicy],
    findings.Prediction: [RunPlan],
    ledger.Writer: [RecordWriter, RolloutWorker],
    GroupRunner: [RolloutWorkers],
}


@pytest.mark.parametrize(
    ("protocol", "cls"),
    [pytest.param(p, c, id=f"{c.__name__}-{p.__name__}") for p, cs in IMPLEMENTATIONS.items() for c in cs],
)
def test_an_implementation_has_what_its_protocol_declares(protocol, cls):
    assert differences(protocol, cls) == []


class Journal(typing.Protocol):
    def issued(self, groups: list[str], *, from_buffer: bool) -> None: ...
    def returned(self, groups: list[str]) -> None: ...
    def consumed(self, groups: list[str], outcome: str, reason: str | None = None) -> None: ...


def test_the_comparison_sees_what_is_missing_renamed_or_of_another_type():
    class Wrong:
        def issued(self, groups, *, from_buffer): ...
        def returned(self, samples): ...
        async def consumed(self, groups, outcome, reason): ...

    told = " ".join(differences(Journal, Wrong))
    for part in (
        "no type for 'groups'",
        "has no parameter 'groups'",
        "needs 'samples'",
        "one of both is async",
        "needs 'reason'",
    ):
        assert part in told
    assert "alive: missing" in " ".join(differences(FleetServer, Wrong))


def test_so_do_those_of_optional_packages():
    pytest.importorskip("megatron.core")
    from slime.backends.megatron.backend import VocabSlice

    assert differences(OutputMatrix, VocabSlice) == []


def test_so_do_those_of_ray():
    pytest.importorskip("ray")
    from slime.runtime.on_ray import ObjectRef, RayHandle, RayRuntime

    pairs = ((Ref, ObjectRef), (Beating, RayHandle), (Runtime, RayRuntime))
    assert [why for protocol, cls in pairs for why in differences(protocol, cls)] == []


def test_every_protocol_of_the_package_is_held_to():
    declared = {
        f"{str(file.relative_to(PACKAGE).with_suffix('')).removesuffix('/__init__')}.{line.split()[1].partition('(')[0]}"
        for file in PACKAGE.rglob("*.py")
        for line in file.read_text().splitlines()
        if line.startswith("class ") and ("Protocol)" in line or "(Protocol[" in line)
    }
    held = {f"{p.__module__.removeprefix('slime.').replace('.', '/')}.{p.__name__}" for p in IMPLEMENTATIONS}
    assert declared == held


# ---- nobody asks for more ----------------------------------------------------------------------------------

COMMON = [f for f in PACKAGE.rglob("*.py") if f.parent.name not in ("fsdp", "megatron", "verify_model")]
FLEETS = [PACKAGE / "engines/fleet.py", PACKAGE / "engines/balancer.py", *(PACKAGE / "cluster").rglob("*.py")]


@pytest.mark.parametrize(
    ("protocol", "names", "files"),
    [
        (TrainBackend, ("backend", "_backend"), COMMON),
        (FleetServer, ("server",), FLEETS),
        (Rotation, ("rotation", "_rotation"), FLEETS),
        (Runtime, ("runtime", "_runtime"), (PACKAGE / "cluster").rglob("*.py")),
        (Sender, ("_sender",), [PACKAGE / "cluster/training/rank_sender.py"]),
        (LiveSender, ("_live_sender",), [PACKAGE / "cluster/training/rank_sender.py"]),
    ],
)
def test_callers_use_only_what_is_declared(protocol, names, files):
    asked = attributes_of(names, files)
    assert asked, "nobody uses it under these names any more"
    assert {name: where for name, where in asked.items() if name not in members(protocol)} == {}


def test_calls_over_the_process_seam_name_the_method_itself():
    """Then the type checker holds the arguments to it, and an editor goes to it."""
    by_name = [
        f"{file.relative_to(PACKAGE)}:{node.lineno}"
        for file in [*(PACKAGE / "cluster").rglob("*.py"), *(PACKAGE / "runtime").rglob("*.py")]
        for node in nodes_of(file)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if node.func.attr in ("call", "call_control", "begin")
        if node.args and not isinstance(node.args[0], (ast.Attribute, ast.Name))
    ]
    assert by_name == []
