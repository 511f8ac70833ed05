"""Placement, schedule and residency, each by itself."""

import json
from types import SimpleNamespace

import pytest

from slime.arguments import RunInfo
from slime.arguments.groups.topology import plain_topology
from slime.cluster.parts import _find_devices
from slime.cluster.residency import GENERATE, SYNC, TRAIN, Residency
from slime.cluster.rollout_schedule import RolloutSchedule
from slime.cluster.run_log import _TRAIN_HEADLINE, headline_of
from slime.cluster.serving.engine_plane import _with_model_facts
from slime.cluster.serving.served_model import ranks_on_engines, takes_handles
from slime.runtime.base import Ready
from slime.runtime.placement import by_engine, num_machines_needed, plan_placement


def sizes(**changes):
    base = {
        "debug_rollout_only": False,
        "debug_train_only": False,
        "actor_num_nodes": 1,
        "actor_num_gpus_per_node": 2,
        "rollout_num_gpus": 2,
        "rollout_num_gpus_per_engine": 1,
        "num_gpus_per_node": 8,
        "rollout_engine": "sglang",
        "colocate": False,
    }
    sizes = {**base, **changes}
    topology = plain_topology(None, sizes["rollout_num_gpus"], sizes["rollout_num_gpus_per_engine"])
    return SimpleNamespace(**{"engine_topology": topology, "rollout_external_engine_addrs": None, **sizes})


def test_engines_follow_the_trainer_on_the_devices():
    placement = plan_placement(sizes(), 4)
    assert [slot.gpu_ids for slot in placement.trainer] == [(0,), (1,)]
    assert [slot.gpu_ids for slot in placement.engines] == [(2,), (3,)]


def test_colocated_engines_share_the_trainers_devices():
    placement = plan_placement(sizes(colocate=True, rollout_num_gpus_per_engine=2), 2)
    assert [slot.gpu_ids for slot in placement.engines] == [(0, 1)]


def test_a_cpu_machine_has_slots_without_devices():
    placement = plan_placement(sizes(), 0)
    assert len(placement.trainer) == len(placement.engines) == 2
    assert placement.trainer[0].env == {}


def test_debug_modes_place_one_stage_only():
    assert plan_placement(sizes(debug_train_only=True), 0).engines == ()
    assert plan_placement(sizes(debug_rollout_only=True), 0).trainer == ()


def test_machines_with_gpus_may_join_a_head_without_any():
    class GrowingCluster:
        gpus = 0

        def gpus_of_machine(self):
            return self.gpus

        def find_machines(self, wanted, num_gpus=0):
            self.gpus = 8  # they join while the run waits
            return 2 if num_gpus else 3

    assert _find_devices(sizes(actor_num_nodes=2), GrowingCluster()) == (8, 2)


def test_too_few_devices_is_an_error_with_the_numbers():
    with pytest.raises(ValueError, match="need 4 GPUs, but 3 are visible"):
        plan_placement(sizes(), 3)


def where(slots):
    """`machine:gpus` of each slot."""
    return [f"{slot.machine}:{','.join(map(str, slot.gpu_ids))}" for slot in slots]


EIGHT, OTHER_EIGHT = [f"0:{gpu}" for gpu in range(8)], [f"1:{gpu}" for gpu in range(8)]


@pytest.mark.parametrize(
    ("changes", "trainer", "engines"),
    [
        # Half of the GPUs train, the other machine generates.
        (
            {"actor_num_gpus_per_node": 8, "rollout_num_gpus": 8, "per_engine": 4},
            EIGHT,
            ["1:0,1,2,3", "1:4,5,6,7"],
        ),
        # Both machines train, and engines share their GPUs.
        (
            {
                "actor_num_nodes": 2,
                "actor_num_gpus_per_node": 8,
                "rollout_num_gpus": 16,
                "colocate": True,
                "per_engine": 8,
            },
            [*EIGHT, *OTHER_EIGHT],
            ["0:0,1,2,3,4,5,6,7", "1:0,1,2,3,4,5,6,7"],
        ),
        # Half of each machine trains, the other half generates.
        (
            {"actor_num_nodes": 2, "actor_num_gpus_per_node": 4, "rollout_num_gpus": 8, "per_engine": 2},
            [*EIGHT[:4], *OTHER_EIGHT[:4]],
            ["0:4,5", "0:6,7", "1:4,5", "1:6,7"],
        ),
        # Half of each machine trains, and engines share that half.
        (
            {
                "actor_num_nodes": 2,
                "actor_num_gpus_per_node": 4,
                "rollout_num_gpus": 8,
                "colocate": True,
                "per_engine": 4,
            },
            [*EIGHT[:4], *OTHER_EIGHT[:4]],
            ["0:0,1,2,3", "1:0,1,2,3"],
        ),
        # Both machines train, and one engine has the GPUs of both.
        (
            {
                "actor_num_nodes": 2,
                "actor_num_gpus_per_node": 8,
                "rollout_num_gpus": 16,
                "colocate": True,
                "per_engine": 16,
            },
            [*EIGHT, *OTHER_EIGHT],
            ["0:0,1,2,3,4,5,6,7", "1:0,1,2,3,4,5,6,7"],
        ),
    ],
)
def test_a_plan_for_two_machines_with_eight_gpus(changes, trainer, engines):
    changes["rollout_num_gpus_per_engine"] = changes.pop("per_engine")
    placement = plan_placement(sizes(**changes), 8, num_machines=2)
    assert (where(placement.trainer), where(placement.engines)) == (trainer, engines)


def test_ranks_on_an_engine_s_devices_are_counted_over_machines():
    changes = {"actor_num_nodes": 2, "rollout_num_gpus": 4, "rollout_num_gpus_per_engine": 2}
    assert ranks_on_engines(*_planned(sizes(**changes, colocate=True), 8)) == ((0, 1), (2, 3))
    assert ranks_on_engines(*_planned(sizes(**changes), 8)) == ((), ())


def test_an_engine_over_two_machines_is_one_engine_of_the_plan():
    args = sizes(actor_num_nodes=2, rollout_num_gpus=4, rollout_num_gpus_per_engine=4, colocate=True)
    placement = plan_placement(args, 2, num_machines=2)
    assert where(placement.engines) == ["0:0,1", "1:0,1"]
    assert [slot.index for slot in placement.engines] == [0, 0] and len(by_engine(placement.engines)) == 1
    assert ranks_on_engines(args, placement) == ((0, 1, 2, 3),)
    assert not takes_handles(args, placement)
    args.rollout_engine = "embedded"
    with pytest.raises(
        ValueError, match="GPUs of several machines, but --rollout-engine embedded runs on one"
    ):
        plan_placement(args, 2, num_machines=2)
    args = sizes(actor_num_nodes=2, rollout_num_gpus=4, rollout_num_gpus_per_engine=2, colocate=True)
    assert takes_handles(args, plan_placement(args, 2, num_machines=2))


def test_on_cpu_machines_an_engine_has_the_ranks_that_a_machine_is_said_to_have():
    args = sizes(actor_num_gpus_per_node=1, num_gpus_per_node=1, rollout_num_gpus_per_engine=2)
    placement = plan_placement(args, 0, num_machines=2)
    assert where(placement.engines) == ["0:", "1:"] and {slot.index for slot in placement.engines} == {0}
    with pytest.raises(ValueError, match="1 engines on 2 GPUs need 2 GPUs, but 1 are visible"):
        plan_placement(args, 0)


def _planned(args, num_gpus):
    return args, plan_placement(args, num_gpus, num_machines=2)


def test_cpu_machines_get_as_many_ranks_as_asked_and_engines_evenly():
    placement = plan_placement(sizes(actor_num_nodes=2, rollout_num_gpus=3), 0, num_machines=2)
    assert where(placement.trainer) == ["0:", "0:", "1:", "1:"]
    assert where(placement.engines) == ["0:", "0:", "1:"]


@pytest.mark.parametrize(
    ("changes", "num_gpus", "machines"),
    [
        ({"actor_num_nodes": 3}, 8, 3),
        ({"actor_num_nodes": 2, "rollout_num_gpus": 3}, 0, 2),
        ({"actor_num_gpus_per_node": 8, "rollout_num_gpus": 16}, 8, 3),
        ({"actor_num_gpus_per_node": 8, "rollout_num_gpus": 16, "colocate": True}, 8, 2),
    ],
)
def test_the_machines_that_a_run_needs_are_known_before_they_are_there(changes, num_gpus, machines):
    assert num_machines_needed(sizes(**changes), num_gpus) == machines


def test_a_plan_that_two_machines_cannot_hold_is_refused_with_the_flags():
    with pytest.raises(
        ValueError, match="--actor-num-nodes is 3, but there are 2 machines; use at most that"
    ):
        plan_placement(sizes(actor_num_nodes=3), 8, num_machines=2)
    with pytest.raises(
        ValueError, match=r"need 18 GPUs, but 2 machines have 8 each: lower --actor-num-gpus-per-node"
    ):
        plan_placement(sizes(rollout_num_gpus=16), 8, num_machines=2)
    with pytest.raises(ValueError, match=r"9 trainer ranks .* but 2 machines have 8 each"):
        plan_placement(sizes(actor_num_gpus_per_node=9, rollout_num_gpus=1), 8, num_machines=2)


def schedule(num_rollout=5, start=0, **changes):
    args = {
        "eval_interval": 2,
        "skip_eval_before_train": False,
        "save_interval": 2,
        "save": "ckpt",
        "save_hf": None,
        "debug_rollout_only": False,
        "release_train": False,
        **changes,
    }
    return RolloutSchedule(SimpleNamespace(**args), start, num_rollout, None)


def test_the_run_evaluates_first_and_then_at_intervals():
    s = schedule()
    assert [i for i in s if s.eval_before(i)] == [0]
    assert [i for i in s if s.eval_after(i)] == [1, 3]


def test_the_last_rollout_is_always_saved():
    s = schedule()
    assert [i for i in s if s.save_after(i)] == [1, 3, 4]


def test_a_folder_to_save_in_is_enough_to_save_the_end():
    s = schedule(save_interval=None)
    assert [i for i in s if s.save_after(i)] == [4]
    s = schedule(save_interval=None, save=None)
    assert not [i for i in s if s.save_after(i)]
    s = schedule(save_interval=None, save=None, save_hf="model")
    assert [i for i in s if s.save_after(i)] == [4]
    s = schedule(save_interval=None, save=None, save_hf="model", debug_rollout_only=True)
    assert not [i for i in s if s.save_after(i)], "nothing is trained"


def test_a_resumed_run_does_not_evaluate_the_start_again():
    s = schedule(start=3)
    assert list(s) == [3, 4]
    assert not any(s.eval_before(i) for i in s)


class Recorder:
    """Stands for the ranks and for the engines: notes the order in which things leave and come."""

    def __init__(self, peaks=()):
        self.log = []
        self._peaks = iter(peaks)

    def call(self, method, **kwargs):
        return [getattr(self, method.__name__)(**kwargs)]

    def call_control(self, method, *args):
        return Ready(getattr(self, method.__name__)(*args))

    def drain_peak_memory(self):
        return next(self._peaks, None)

    def release(self, tags):
        self.log.append(("release", *sorted(tags)))

    def restore(self, tags):
        self.log.append(("restore", *sorted(tags)))

    def move(self, *, params, optimizer):
        self.log.append(("move", params, optimizer))

    def empty_cache(self):
        self.log.append(("empty cache",))


def test_what_leaves_the_device_goes_before_what_comes():
    recorder = Recorder()
    residency = Residency(SimpleNamespace(offload_rollout=True, offload_train=True), recorder, recorder)
    for phase in (SYNC, GENERATE, TRAIN, SYNC, SYNC, GENERATE):
        residency.enter(phase)
    assert recorder.log == [
        ("release", "cuda_graph", "kv_cache"),
        ("move", "device", "cpu"),
        ("move", "cpu", "cpu"),
        ("restore", "cuda_graph", "kv_cache"),
        ("release", "cuda_graph", "kv_cache", "weights"),
        ("move", "device", "device"),
        ("move", "device", "cpu"),
        ("restore", "weights"),
        ("move", "cpu", "cpu"),
        ("restore", "cuda_graph", "kv_cache"),
    ]


def test_a_trainer_that_stays_gives_back_what_its_step_needed_before_engines_come():
    recorder = Recorder()
    residency = Residency(SimpleNamespace(offload_rollout=True, offload_train=False), recorder, recorder)
    for phase in (SYNC, GENERATE, TRAIN, SYNC, GENERATE):
        residency.enter(phase)
    assert recorder.log == [
        ("release", "cuda_graph", "kv_cache"),
        ("restore", "cuda_graph", "kv_cache"),
        ("release", "cuda_graph", "kv_cache", "weights"),
        ("empty cache",),
        ("restore", "weights"),
        ("restore", "cuda_graph", "kv_cache"),
    ]


def test_the_peak_of_each_phase_is_told_once():
    gib = 2**30
    before = 99 * gib  # until a phase begins
    train = [9 * gib, before, 40 * gib]
    recorder = Recorder(peaks=[before, 90 * gib, *train, before, 25 * gib, before, 91 * gib])
    residency = Residency(SimpleNamespace(offload_rollout=True, offload_train=True), recorder, recorder)
    for phase in (GENERATE, TRAIN, SYNC):
        with residency.phase(phase):
            pass
    assert residency.drain_peaks() == {
        "perf/peak_memory_rollout_gib": 90.0,
        "perf/peak_memory_offload_gib": 9.0,
        "perf/peak_memory_train_gib": 40.0,
        "perf/peak_memory_push_gib": 25.0,
    }
    with residency.phase(GENERATE):
        pass
    assert residency.drain_peaks() == {"perf/peak_memory_rollout_gib": 91.0}


def test_a_cpu_machine_reports_no_device_memory_and_is_asked_once():
    ranks = Recorder(peaks=[None, 1 << 30])
    residency = Residency(SimpleNamespace(offload_rollout=True, offload_train=True), Recorder(), ranks)
    for phase in (TRAIN, SYNC):
        with residency.phase(phase):
            pass
    assert residency.drain_peaks() == {}


def test_without_offload_nothing_moves():
    recorder = Recorder()
    residency = Residency(SimpleNamespace(offload_rollout=False, offload_train=False), recorder, recorder)
    for phase in (GENERATE, TRAIN, SYNC):
        residency.enter(phase)
    assert recorder.log == []


def test_a_step_of_the_critic_alone_still_has_aheadline_of():
    critic_only = {"train/critic-value_loss": 0.25, "train/critic-lr-pg_0": 1e-3}
    assert headline_of(critic_only, _TRAIN_HEADLINE) == "critic-value_loss 0.25"


def test_sizes_of_a_model_that_transformers_does_not_know_are_read_from_its_config(tmp_path):
    known = {
        "vocab_size": 77,
        "num_hidden_layers": 3,
        "max_position_embeddings": 99,
        "num_experts_per_tok": 2,
    }
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "not_in_transformers", **known}))
    silent = SimpleNamespace(vocab_size=None, context_len=None)
    smaller = SimpleNamespace(vocab_size=77, context_len=50)
    info = _with_model_facts(RunInfo("a:1", "runs/a"), str(tmp_path), [silent, smaller])
    assert (info.vocab_size, info.max_context_len, info.num_layers, info.moe_router_topk) == (77, 50, 3, 2)
