"""The topology file: errors name key and value; engines are placed on GPUs and get their launch plan."""

import json
import subprocess
import sys

import pytest
from argument_helpers import parse

from slime.arguments.groups.topology import ServerGroup, plain_topology, prefill_topology, read_topology
from slime.cli.plan import main as plan
from slime.engines.launch_plan import gpu_pool, override_words, place_engines, plan_router
from slime.runtime.placement import plan_placement

FULL = """
sglang:
  - name: policy
    server_groups:
      - {worker_type: prefill, num_gpus: 2, num_gpus_per_engine: 2, overrides: {chunked-prefill-size: 8192}}
      - {worker_type: decode, num_gpus: 4, num_gpus_per_engine: 2}
      - {worker_type: placeholder, num_gpus: 2}
  - name: reward
    model_path: org/reward
    server_groups:
      - {num_gpus: 2, overrides: {mem_fraction_static: 0.5, enable_metrics: true, disable_radix_cache: false}}
"""
COMMON = "--dtype bfloat16 --random-seed 1234 --weight-version default"
PORTS = "--host 127.0.0.1 --port '{port}' --nccl-port '{nccl_port}'"
SERVER = "python -m sglang.launch_server"
GOLDEN = f"""10 GPUs, 5 engines, 2 models

model policy: org/policy
  weights: every push
  router: sglang --pd-disaggregation
  engine-0 (prefill) on machine 0 GPU 0,1
    {SERVER} --model-path org/policy {PORTS} {COMMON} --tp-size 2 --disaggregation-mode prefill \
--disaggregation-bootstrap-port '{{bootstrap_port}}' --chunked-prefill-size 8192
  engine-1 (decode) on machine 0 GPU 2,3
    {SERVER} --model-path org/policy {PORTS} {COMMON} --tp-size 2 --disaggregation-mode decode
  engine-2 (decode) on machine 0 GPU 4,5
    {SERVER} --model-path org/policy {PORTS} {COMMON} --tp-size 2 --disaggregation-mode decode
  placeholder: 2 GPUs stay free

model reward: org/reward
  weights: as loaded, never changed
  router: sglang
  reward-engine-0 (regular) on machine 1 GPU 0
    {SERVER} --model-path org/reward {PORTS} {COMMON} --tp-size 1 --mem-fraction-static 0.5 --enable-metrics
  reward-engine-1 (regular) on machine 1 GPU 1
    {SERVER} --model-path org/reward {PORTS} {COMMON} --tp-size 1 --mem-fraction-static 0.5 --enable-metrics
"""


@pytest.fixture
def write(tmp_path):
    def write(text: str) -> str:
        path = tmp_path / "topology.yaml"
        path.write_text(text)
        return str(path)

    return write


def test_the_plan_of_a_whole_topology_is_printed(write, capsys):
    assert plan(["--topology", write(FULL), "--hf-checkpoint", "org/policy"]) == 0
    assert capsys.readouterr().out == GOLDEN


def test_the_plan_is_a_command(write):
    words = ["plan", "--topology", write(FULL), "--hf-checkpoint", "org/policy", "--json"]
    done = subprocess.run([sys.executable, "-m", "slime", *words], capture_output=True, text=True)
    made = json.loads(done.stdout)
    assert [engine["gpu_ids"] for engine in made["engines"]] == [[0, 1], [2, 3], [4, 5], [0], [1]]
    assert made["routers"][0]["words"] == ["--pd-disaggregation"]


def test_a_mistake_in_a_planned_file_is_one_line_and_exit_code_2(write, capsys):
    with pytest.raises(SystemExit) as stopped:
        plan(["--topology", write("sglang: []")])
    assert stopped.value.code == 2 and "`sglang` is []" in capsys.readouterr().err


def test_what_a_group_leaves_open_follows_from_its_model_and_then_from_the_arguments(write):
    text = """
    sglang:
      - name: a
        num_gpus_per_engine: 4
        server_groups: [{num_gpus: 8}, {num_gpus: 4, num_gpus_per_engine: 2}]
      - {name: b, update_weights: false, engine_groups: [{num_gpus: 4}]}
    """
    topology = read_topology(write(text), "org/policy", 2)
    assert [[g.num_gpus_per_engine for g in m.groups] for m in topology.models] == [[4, 2], [2]]
    assert [m.num_engines for m in topology.models] == [4, 2]
    assert [m.model_path for m in topology.models] == ["org/policy", "org/policy"]


def test_the_model_of_the_checkpoint_learns_and_another_does_not(write):
    topology = read_topology(write(FULL), "org/policy", 1)
    assert [model.update_weights for model in topology.models] == [True, False]
    assert topology.policy.name == "policy" and topology.num_gpus == 10


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("models: []", r"topology.yaml: unknown key 'models'; there are sglang"),
        ("sglang: 3", r"`sglang` is 3; write a list of models"),
        ("sglang: [{server_groups: []}]", r"sglang\[0\]\.name is None; give each model a name"),
        ("sglang: [{name: a}]", r"sglang\[0\]\.server_groups is None; write a list"),
        (
            "sglang: [{name: a, server_group: []}]",
            r"sglang\[0\]: unknown key 'server_group'; did you mean 'server_groups'",
        ),
        (
            "sglang: [{name: a, server_groups: [{}]}]",
            r"server_groups\[0\]\.num_gpus is None; write a whole number",
        ),
        ("sglang: [{name: a, server_groups: [{num_gpus: true}]}]", r"num_gpus is True"),
        (
            "sglang: [{name: a, server_groups: [{num_gpus: 3, num_gpus_per_engine: 2}]}]",
            r"server_groups\[0\]\.num_gpus is 3, not a multiple of num_gpus_per_engine 2: 1 would stay idle",
        ),
        (
            "sglang: [{name: a, server_groups: [{num_gpus: 1, worker_type: prefil}]}]",
            r"worker_type is 'prefil'; use one",
        ),
        (
            "sglang: [{name: a, server_groups: [{num_gpus: 1, worker_type: encoder}]}]",
            r"encoder, which this version does",
        ),
        (
            "sglang: [{name: a, server_groups: [{num_gpus: 1, worker_type: prefill}]}]",
            r"\(a\) has no decode group",
        ),
        (
            "sglang: [{name: a, server_groups: [{num_gpus: 1}, {num_gpus: 1, worker_type: decode}]}]",
            r"\(a\) mixes regular groups with decode",
        ),
        ("sglang: [{name: a, server_groups: [{num_gpus: 1, overrides: 3}]}]", r"overrides is 3; write"),
        (
            "sglang: [{name: a, server_groups: [{num_gpus: 1, worker_type: placeholder}]}]",
            r"every group is a placeholder",
        ),
        (
            "sglang: [{name: a, server_groups: [{num_gpus: 1}]}, {name: a, server_groups: [{num_gpus: 1}]}]",
            r"two models are called 'a'",
        ),
        (
            "sglang: [{name: a, server_groups: [{num_gpus: 1}]}, {name: b, server_groups: [{num_gpus: 1}]}]",
            r"update_weights is true for a, b: keep one",
        ),
        (
            "sglang: [{name: a, model_path: x, server_groups: [{num_gpus: 1, overrides: {model_path: y}}]}]",
            r"sglang\[0\] names several model paths \(x, y\)",
        ),
        (
            "sglang: [{name: a, update_weights: maybe, server_groups: [{num_gpus: 1}]}]",
            r"update_weights is 'maybe'",
        ),
    ],
)
def test_each_mistake_names_the_key_the_value_and_the_fix(write, text, message):
    with pytest.raises(ValueError, match=message):
        read_topology(write(text), "org/policy", 1)


def test_engines_start_after_the_trainers_gpus_and_placeholders_stay_free(write):
    text = "sglang: [{name: a, server_groups: [{worker_type: placeholder, num_gpus: 1}, {num_gpus: 2}]}]"
    places = place_engines(read_topology(write(text), "m", 1), gpu_pool(1, 8, first=2))
    assert [place.gpu_ids for place in places] == [(3,), (4,)]


def test_an_engine_never_lies_on_two_machines():
    with pytest.raises(
        ValueError, match="4 GPUs from GPU 2 of machine 0 to GPU 1 of machine 1, which are on two machines"
    ):
        place_engines(plain_topology("m", 4, 4), gpu_pool(2, 4, first=2))


def test_an_engine_larger_than_a_machine_takes_as_many_gpus_of_each_of_several():
    places = place_engines(plain_topology("m", 16, 8), gpu_pool(4, 4))
    assert [(place.name, place.machine, place.gpu_ids) for place in places] == [
        ("engine-0", 0, (0, 1, 2, 3)),
        ("engine-0", 1, (0, 1, 2, 3)),
        ("engine-1", 2, (0, 1, 2, 3)),
        ("engine-1", 3, (0, 1, 2, 3)),
    ]
    assert [(place.node, place.num_nodes, place.num_gpus) for place in places] == [(0, 2, 8), (1, 2, 8)] * 2
    # Trainers on half of each machine leave the other half.
    left = [gpu for gpu in gpu_pool(2, 8) if gpu[1] >= 4]
    assert [place.gpu_ids for place in place_engines(plain_topology("m", 8, 8), left)] == [(4, 5, 6, 7)] * 2


def test_parts_of_an_engine_have_the_same_size():
    with pytest.raises(
        ValueError, match=r"12 GPUs: 8 of machine 0, 4 of machine 1; .*Use a multiple of 8 GPUs per engine"
    ):
        place_engines(plain_topology("m", 12, 12), gpu_pool(2, 8))
    with pytest.raises(ValueError, match="16 GPUs: 4 of machine 0, 8 of machine 1, 4 of machine 2"):
        place_engines(plain_topology("m", 16, 16), gpu_pool(3, 8, first=4))


def test_the_plan_of_an_engine_on_two_machines_has_a_command_for_each(capsys):
    assert (
        plan(["--hf-checkpoint", "m", "--rollout-num-gpus", "16", "--rollout-num-gpus-per-engine", "16"]) == 0
    )
    shown = capsys.readouterr().out
    assert shown.startswith("16 GPUs, 1 engines, 1 models")
    assert "engine-0 (regular) on machine 1 GPU 0,1,2,3,4,5,6,7" in shown
    assert shown.count("--tp-size 16 --nnodes 2") == 2 and "--node-rank 1 --dist-init-addr" in shown


def test_prefill_servers_are_a_short_form_of_two_groups():
    model = prefill_topology("m", 8, 2, 1).policy
    assert model.groups == (ServerGroup("prefill", 2, 2), ServerGroup("decode", 6, 2))
    with pytest.raises(ValueError, match="--prefill-num-servers is 4, but there are 4 engines"):
        prefill_topology("m", 8, 2, 4)


def test_one_engine_alone_needs_no_router():
    assert plan_router(plain_topology("m", 1, 1).policy, "builtin").kind == "none"
    assert plan_router(plain_topology("m", 2, 1).policy, "builtin").kind == "builtin"
    assert plan_router(prefill_topology("m", 2, 1, 1).policy, "builtin").words == ("--pd-disaggregation",)


def test_overrides_become_words_and_a_false_switch_is_left_out():
    words = override_words(
        {"mem_fraction_static": 0.5, "enable_metrics": True, "x": False, "lora_paths": ["a", "b"]}
    )
    assert words == ("--mem-fraction-static", "0.5", "--enable-metrics", "--lora-paths", "a", "b")


def test_a_run_takes_the_sum_of_its_groups_and_refuses_another_number(write):
    path = write("sglang: [{name: a, server_groups: [{num_gpus: 3}]}]")
    flags = ("--sglang-config", path, "--rollout-engine", "embedded")
    assert parse(*flags, rollout_num_gpus=None).rollout_num_gpus == 3
    with pytest.raises(ValueError, match=r"--rollout-num-gpus is 2, but the groups .* have 3 GPUs together"):
        parse(*flags, rollout_num_gpus=2)


def test_a_run_refuses_a_topology_in_which_nothing_learns(write):
    path = write("sglang: [{name: a, model_path: org/other, server_groups: [{num_gpus: 1}]}]")
    with pytest.raises(ValueError, match="no model gets the trainer's weights; set update_weights: true"):
        parse("--sglang-config", path, "--rollout-engine", "embedded")


def test_overrides_need_an_engine_that_knows_them(write):
    path = write("sglang: [{name: a, server_groups: [{num_gpus: 1, overrides: {page_size: 4}}]}]")
    with pytest.raises(
        ValueError,
        match="'a' of the topology has prefill groups or overrides, which --rollout-engine embedded",
    ):
        parse("--sglang-config", path, "--rollout-engine", "embedded")


def test_two_sources_of_engines_are_refused(write):
    path = write("sglang: [{name: a, server_groups: [{num_gpus: 1}]}]")
    with pytest.raises(
        ValueError, match="--sglang-config and --prefill-num-servers both say which engines serve"
    ):
        parse("--sglang-config", path, "--prefill-num-servers", "1")


def test_external_engines_take_no_gpu_of_ours():
    args = parse("--rollout-external-engine-addrs", "10.0.0.5:30000", "10.0.0.6:30000", rollout_num_gpus=None)
    assert args.rollout_num_gpus == 0 and not args.colocate
    assert [slot.gpu_ids for slot in plan_placement(args, 1).engines] == [(), ()]
    with pytest.raises(ValueError, match="external engines have their own GPUs"):
        parse("--rollout-external-engine-addrs", "10.0.0.5:30000", strict=True)


def test_engines_of_a_topology_get_the_gpus_after_the_trainers(write):
    path = write(
        "sglang: [{name: a, server_groups: [{num_gpus: 2}]}, {name: b, model_path: org/b, server_groups: "
        "[{num_gpus: 1}]}]"
    )
    args = parse("--sglang-config", path, "--rollout-engine", "embedded", rollout_num_gpus=None)
    assert [slot.gpu_ids for slot in plan_placement(args, 8).engines] == [(1,), (2,), (3,)]
    with pytest.raises(
        ValueError, match="1 trainer ranks and 3 engines on 3 GPUs need 4 GPUs, but 2 are visible"
    ):
        plan_placement(args, 2)


def test_a_flag_of_the_router_needs_engines_that_it_can_talk_to():
    with pytest.raises(
        ValueError, match=r"--router-policy means SGLang's router, .* use --rollout-engine sglang"
    ):
        parse("--router-policy", "manual")
    with pytest.raises(
        ValueError, match="--rollout-router builtin is set, but --router-policy needs SGLang's router"
    ):
        parse("--router-policy", "manual", "--rollout-router", "builtin")
