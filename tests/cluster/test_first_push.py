"""The first push is proven by what engines had loaded: overwritten before it, they must hold that again.

Engines that answer over HTTP as SGLang does: they fuse weights, so only their checksums say what they hold.
"""

import json
from types import SimpleNamespace

import pytest
from aiohttp import web
from tiny_model import make_tiny_model

from slime.arguments import default_args
from slime.cluster.serving.engine_weights import EngineWeights
from slime.cluster.serving.loaded_weights import starts_as_served
from slime.engines.fleet import EngineFleet, WatchPolicy
from slime.utils.async_utils import run
from slime.weight_sync.base import LiveReport, WeightBundle
from slime.wire.control import EngineControl
from slime.wire.protocol import EngineInfo

MODEL = {"q": 1, "k": 2, "v": 3, "norm": 4, "head": 5}
NOISE = -1


class Engine:
    """Serves SGLang's control plane; holds q, k and v as one tensor, and a table that no file has."""

    def __init__(self, name: str, **said):
        self.plan, self.pid, self.up = SimpleNamespace(name=name), 1, True
        self.said = {"version": "0.5.23", "model_path": "m", **said}
        self.held = {"qkv": [0, 0, 0], "norm": [0], "head": [0], "bias": [7]}
        self.version, self.calls = "default", []
        self.refuses: set[str] = set()
        self.resets = ["qkv", "norm", "head"]  # what it overwrites
        self.load(MODEL)

    def load(self, weights: dict[str, int]) -> None:
        for name, value in weights.items():
            tensor, place = ("qkv", "qkv".index(name)) if name in "qkv" else (name, 0)
            self.held[tensor][place] = value

    async def answer(self, request: web.Request) -> web.Response:
        body = json.loads(await request.text() or "{}") if request.method == "POST" else {}
        path = request.path.strip("/")
        self.calls.append(body.get("action", path))
        if self.calls[-1] in self.refuses:
            return web.json_response({"success": False, "message": "Unsupported"}, status=400)
        if path == "server_info":
            return web.json_response(self.said)
        if path == "model_info":
            return web.json_response({"model_path": "m", "weight_version": self.version})
        if path == "update_weights_from_disk":
            weights = f"{body['model_path']}/weights.json"
            with open(weights) as file:
                self.load(json.load(file))
            self.version = body["weight_version"]
        answer = {"success": True, "message": ""}
        if body.get("action") == "reset_tensors":
            for name in self.resets:
                self.held[name] = [NOISE] * len(self.held[name])
        if body.get("action") == "checksum":
            answer["ranks"] = [{"checksums": {name: str(value) for name, value in self.held.items()}}]
        return web.json_response(answer)

    async def start(self) -> "Engine":
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self.answer)
        self.runner = web.AppRunner(app)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}"
        return self

    def alive(self) -> bool:
        return self.up

    def kill(self) -> None:
        self.up = False

    def stop(self) -> None:
        run(self.runner.cleanup())


class World:
    """Engines, what keeps their weights, and the files that the trainer leaves for engines that come late."""

    def __init__(self, engines: list[Engine], folder):
        self.engines, self._folder = engines, folder
        args = SimpleNamespace(
            pause_generation_mode="auto",
            check_weight_update_equal=False,
            weight_checksum_interval=0,
            timeouts={"update-weight": 60.0},
        )
        self.fleet = EngineFleet(engines, WatchPolicy(3, 600.0))
        self.weights = EngineWeights(args, "slime-x", ((),) * len(engines), self.fleet)

    def push(self, *sent: dict[str, int], files: dict[str, int] = MODEL, number: int = 1) -> None:
        """A live push that brings each engine what is in its place of `sent`; the copy holds `files`."""
        version = f"run:{number}"
        targets = self.weights.begin_live()
        for engine, weights in zip(self.engines, sent, strict=True):
            engine.load(weights)
            engine.version = version
        self.weights.finish_live(version, targets, LiveReport(len(files), 4 * len(files), {}))
        self._folder.mkdir(exist_ok=True)
        (self._folder / "weights.json").write_text(json.dumps(files))
        self.metrics = self.weights.receive(
            WeightBundle(version, "disk", len(files), 4 * len(files), None, self._folder)
        )

    @property
    def evicted(self) -> list[str]:
        return [engine.plan.name for engine in self.engines if not engine.up]


@pytest.fixture
def world(tmp_path):
    made: list[World] = []

    def make(num_engines: int = 1, **said) -> World:
        engines = [run(Engine(f"engine-{i}", **said).start()) for i in range(num_engines)]
        made.append(World(engines, tmp_path / "copy"))
        return made[-1]

    yield make
    for one in made:
        one.fleet.stop()


def without(*names: str) -> dict[str, int]:
    return {name: value for name, value in MODEL.items() if name not in names}


@pytest.mark.parametrize("num_engines", [1, 3])
def test_a_push_that_restores_what_was_loaded_is_proven_without_files(world, num_engines):
    world = world(num_engines)
    world.weights.note_loaded()
    world.push(*[MODEL] * num_engines)
    assert world.evicted == [] and world.metrics["perf/engines_evicted"] == 0
    for engine in world.engines:
        assert "update_weights_from_disk" not in engine.calls
        assert engine.calls.index("reset_tensors") < engine.calls.index("begin_weight_update")
        assert engine.calls.count("checksum") == 2
        paused, reset = engine.calls.index("pause_generation"), engine.calls.index("reset_tensors")
        assert paused < reset and engine.calls[-1] == "checksum"


@pytest.mark.parametrize(
    ("sent", "named"),
    [
        ({**MODEL, "norm": 9}, "norm"),
        (without("norm"), "norm"),
        (without("v"), "qkv"),  # a part of a fused one stays as it was
        ({}, "head"),
    ],
    ids=["one wrong", "one missing", "a part missing", "nothing came"],
)
def test_a_push_that_brings_something_else_is_noticed_and_named(world, caplog, sent, named):
    world = world()
    world.weights.note_loaded()
    world.push(sent)
    assert world.evicted == ["engine-0"] and world.metrics["perf/engines_evicted"] == 1
    assert f"'0:{named}'" in caplog.text


def test_of_several_engines_the_one_that_differs_is_evicted_whichever_it_is(world, caplog):
    for wrong in range(3):
        made = world(3)
        made.weights.note_loaded()
        made.push(*[without("head") if i == wrong else MODEL for i in range(3)])
        assert made.evicted == [f"engine-{wrong}"]
        assert "'0:head'" in caplog.text
        assert all("update_weights_from_disk" not in engine.calls for engine in made.engines)
        caplog.clear()


def test_a_push_that_is_wrong_everywhere_leaves_no_engine_in_service(world, caplog):
    world = world(2)
    world.weights.note_loaded()
    world.push(*[without("norm")] * 2)
    assert world.evicted == ["engine-0", "engine-1"] and world.metrics["perf/engines_evicted"] == 2
    assert "differs from the trainer in 1 tensors: ['0:norm']" in caplog.text


def test_what_a_push_does_not_restore_is_not_served_though_the_trainer_s_files_agree(world, caplog):
    """Noise in a table that neither files nor pushes bring; only a new start makes it whole."""
    world = world()
    world.engines[0].resets.append("bias")
    world.weights.note_loaded()
    world.push(MODEL)
    assert world.evicted == ["engine-0"] and world.metrics["perf/engines_evicted"] == 1
    assert "left 1 tensors otherwise than it had loaded them: ['0:bias']" in caplog.text


@pytest.mark.parametrize("refused", ["checksum at the start", "reset_tensors", "nothing is noted"])
def test_where_there_is_no_such_proof_the_push_is_compared_with_files(world, caplog, refused):
    for sent, evicted in ((MODEL, []), ({**MODEL, "norm": 9}, ["engine-0"])):
        made = world()
        [engine] = made.engines
        if refused == "checksum at the start":
            engine.refuses = {"checksum"}
        if refused == "reset_tensors":
            engine.refuses = {"reset_tensors"}
        if refused != "nothing is noted":
            made.weights.note_loaded()
        engine.refuses -= {"checksum"}
        made.push(sent)
        assert "update_weights_from_disk" in engine.calls and made.evicted == evicted
    assert "differs from the trainer in 1 tensors: ['0:norm']" in caplog.text


def test_the_trainer_is_lost_in_the_first_push_and_the_next_one_is_proven_all_the_same(world):
    world = world()
    world.weights.note_loaded()
    world.weights.abandon_live(world.weights.begin_live())
    world.push(MODEL)
    assert world.evicted == [] and "update_weights_from_disk" not in world.engines[0].calls


def test_an_engine_that_started_again_meanwhile_is_not_overwritten(world):
    world = world()
    world.weights.note_loaded()
    world.engines[0].pid = 2
    world.push(MODEL)
    assert "reset_tensors" not in world.engines[0].calls
    assert "update_weights_from_disk" in world.engines[0].calls and world.evicted == []


def test_later_pushes_overwrite_nothing(world):
    world = world()
    world.weights.note_loaded()
    world.push(MODEL)
    [engine] = world.engines
    engine.calls.clear()
    world.push({**MODEL, "norm": 9}, number=2)
    assert not {"reset_tensors", "checksum", "update_weights_from_disk"} & {*engine.calls}
    world.weights.note_loaded()  # of a later start of the trainer
    assert "checksum" not in engine.calls


@pytest.mark.parametrize(
    "said",
    [
        {"quantization": "fp8"},
        {"kv_cache_dtype": "fp8_e4m3"},
        {"speculative_algorithm": "EAGLE"},
        {"enable_lora": True},
        {"pp_size": 2},
        {"dp_size": 2},
    ],
)
def test_engines_that_derive_more_from_weights_are_compared_with_files(world, said):
    world = world(**said)
    world.weights.note_loaded()
    world.push(MODEL)
    assert "reset_tensors" not in world.engines[0].calls
    assert "update_weights_from_disk" in world.engines[0].calls


def test_our_own_engine_is_never_overwritten(world):
    made = world(engine="embedded")
    assert not run(EngineControl(made.engines[0].url).info()).can_be_overwritten
    assert EngineInfo.from_json({"version": "0.5.16", "kv_cache_dtype": "auto"}).can_be_overwritten


def test_only_a_trainer_that_begins_with_the_served_files_relies_on_them(tmp_path):
    model = str(make_tiny_model(tmp_path / "model"))

    def begins(folder=None, **flags) -> bool:
        return starts_as_served(default_args(hf_checkpoint=model, **flags), folder)

    assert begins()
    assert not begins(tmp_path / "checkpoint")
    assert not begins(lora_rank=4)
    assert not begins(update_weight_mode="delta")
    assert not begins(rollout_quantization="fp8")
    assert not begins(start_from=str(tmp_path / "torch_dist"))
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": {}}))
    assert not begins()
