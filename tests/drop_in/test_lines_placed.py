"""Launch lines are placed on clusters that are described as machines x GPUs; none of them is here."""

import itertools

import pytest
from launch_lines import DATA, LARGE, MODELS, RECIPES, command_line, make_world

from slime.arguments import parse_args
from slime.arguments.groups import cluster
from slime.arguments.passthrough import sglang_flags
from slime.cluster.serving.served_model import by_engine, plan_engines, ranks_on_engines
from slime.runtime.placement import Machine, num_machines_needed, plan_placement
from slime.utils.machine.run_identity import Run

GPUS = 8  # of each machine
CASES = [("qwen3_moe", recipe) for recipe in RECIPES] + [(model, "many nodes") for model in MODELS]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("world")
    make_world(root)
    return root


@pytest.fixture(autouse=True)
def described(root, monkeypatch):
    """SGLang's flags come from a file, and each machine has eight GPUs."""
    monkeypatch.setattr(sglang_flags, "_cache_folder", lambda: root)
    monkeypatch.setattr(cluster, "visible_gpus", lambda: GPUS)


@pytest.fixture
def read(root):
    """Parse a line without the flags of Megatron's models."""
    common = f"--hf-checkpoint {{root}}/deepseek_v3 --sglang-python {{root}}/python {DATA}"
    common = common.replace("--balance-data", "").format(root=root)
    return lambda line, *more: parse_args([*common.split(), *line.split(), *more])


@pytest.fixture
def large(read):
    return lambda name, *more: read(LARGE[name][0], *more)


@pytest.mark.parametrize(("model", "recipe"), sorted(set(CASES)))
def test_every_line_has_a_place_on_its_machines(root, model, recipe, tmp_path):
    pytest.importorskip("megatron")
    args = parse_args(command_line(model, recipe, root))
    check_places(args, LARGE[recipe][1] if recipe in LARGE else args.actor_num_nodes, tmp_path)


def check_places(args, hosts, folder):
    machines = [Machine(f"10.0.0.{i}", tuple(range(GPUS)), cores=64) for i in range(hosts)]
    placement = plan_placement(args, GPUS, hosts).on(machines)
    assert max(placement.gpus_of_machines) <= GPUS and len(placement.gpus_of_machines) <= hosts
    engines = by_engine(placement.engines)
    sizes = {sum(len(slot.gpu_ids) for slot in slots) for slots in engines}
    assert sizes <= {args.rollout_num_gpus_per_engine}
    used = [gpu for slot in placement.engines for gpu in slot.gpus]
    assert len(used) == len(set(used)) == (0 if args.debug_train_only else args.rollout_num_gpus)
    assert args.colocate or not {gpu for slot in placement.trainer for gpu in slot.gpus} & set(used)
    plans = plan_engines(args, Run("run", folder, "x"), placement.engines) if used else []
    assert [plan.host for plan in plans] == [slot.host for slot in placement.engines]
    if args.colocate:
        assert sorted(itertools.chain(*ranks_on_engines(args, placement))) == [*range(len(placement.trainer))]


# Flags of sizes -> machines of eight GPUs, and which of all GPUs, counted over machines, train and generate.
LAYOUTS = {
    "--debug-train-only --load-debug-rollout-data a.pt": (1, range(8), ()),
    "--debug-rollout-only --rollout-num-gpus 16": (2, (), range(16)),
    "--colocate": (1, range(8), range(8)),
    "--colocate --actor-num-nodes 2 --rollout-num-gpus-per-engine 8": (2, range(16), range(16)),
    "--colocate --rollout-num-gpus 4": (1, range(8), range(4)),
    "--colocate --rollout-num-gpus 16": (2, range(8), range(16)),
    "--colocate --advantage-estimator ppo": (1, range(8), range(8)),  # the critic has the actor's ranks
    "--actor-num-gpus-per-node 4 --rollout-num-gpus 4 --rollout-num-gpus-per-engine 2": (
        1,
        range(4),
        range(4, 8),
    ),
    "--actor-num-nodes 2 --rollout-num-gpus 16 --rollout-num-gpus-per-engine 4": (
        4,
        range(16),
        range(16, 32),
    ),
    "--actor-num-nodes 2 --rollout-num-gpus 8 --rollout-num-gpus-per-engine 8 --sglang-dp-size 8 "
    "--sglang-enable-dp-attention": (3, range(16), range(16, 24)),
}


@pytest.mark.parametrize("sizes", LAYOUTS)
def test_trainer_and_engines_get_the_gpus_that_a_slime_user_expects(read, sizes):
    hosts, train, generate = LAYOUTS[sizes]
    args = read(f"--actor-num-gpus-per-node 8 --num-gpus-per-node 8 {sizes}")
    assert num_machines_needed(args, GPUS) == hosts
    placement = plan_placement(args, GPUS, hosts)
    places = [
        [m * GPUS + gpu for slot in side for m, gpu in slot.gpus]
        for side in (placement.trainer, placement.engines)
    ]
    assert places == [[*train], [*generate]]


@pytest.mark.parametrize("recipe", LARGE)
def test_a_large_engine_has_equal_parts_on_neighbouring_machines(large, recipe, tmp_path):
    args = large(recipe)
    check_places(args, LARGE[recipe][1], tmp_path)
    assert args.runtime == "ray" and args.rollout_engine == "sglang"
    placement, each = plan_placement(args, GPUS, LARGE[recipe][1]), args.rollout_num_gpus_per_engine
    engines = by_engine(placement.engines)
    assert len(engines) == args.rollout_num_gpus // each
    for slots in engines:
        assert [len(slot.gpu_ids) for slot in slots] == [GPUS] * (each // GPUS)
        assert [slot.machine for slot in slots] == list(range(slots[0].machine, slots[-1].machine + 1))


def test_a_cluster_that_is_too_small_is_refused_with_the_numbers(large):
    args = large("671B on 16 machines")
    with pytest.raises(ValueError, match="--actor-num-nodes is 16, but there are 8 machines"):
        plan_placement(args, GPUS, 8)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            ("--runtime", "local", "--actor-num-nodes", "1"),
            "--rollout-num-gpus-per-engine is 64, and a machine has 8 .* these are local and sglang",
        ),
        (("--sglang-pp-size", "2"), "--sglang-pp-size cannot be given: SGLang gives the ranks of all stages"),
        (
            ("--sglang-dp-size", "24"),
            "--sglang-dp-size is 24, which does not divide the 64 GPUs of an engine",
        ),
        (
            ("--sglang-ep-size", "48"),
            "--sglang-ep-size is 48, which does not divide the 64 GPUs of an engine",
        ),
        (("--sglang-attn-dp-size", "4"), "--sglang-dp-size is 64: SGLang would start 64 copies .* remove it"),
    ],
)
def test_what_would_not_start_or_would_hang_is_refused_by_name(large, more, message):
    with pytest.raises(ValueError, match=message):
        large("671B on 16 machines", *more)


def test_copies_of_the_model_in_one_server_are_refused_in_flags_and_in_a_topology(read, tmp_path):
    engines = "--rollout-num-gpus-per-engine 2 --actor-num-gpus-per-node 8 --colocate"
    with pytest.raises(ValueError, match="--sglang-dp-size is 2: SGLang would start 2 copies"):
        read(engines, "--sglang-dp-size", "2")
    read(engines, "--sglang-dp-size", "2", "--sglang-enable-dp-attention")
    read(engines, "--sglang-attn-dp-size", "2", "--sglang-ep-size", "2")
    file = tmp_path / "topology.yaml"
    group = "{num_gpus: 8, num_gpus_per_engine: 4, overrides: {dp_size: 4, enable_dp_attention: %s}}"
    words = "--actor-num-gpus-per-node 8 --colocate", "--sglang-config", str(file)
    file.write_text("sglang: [{name: policy, server_groups: [" + group % "true" + "]}]")
    assert read(*words).rollout_num_gpus == 8
    file.write_text("sglang: [{name: policy, server_groups: [" + group % "false" + "]}]")
    with pytest.raises(ValueError, match=r"--sglang-dp-size is 4 \(in the topology's model 'policy'\)"):
        read(*words)


def test_an_engine_that_runs_on_one_machine_is_refused_more_than_its_gpus(root):
    words = ["--rollout-engine", "embedded", "--hf-checkpoint", str(root / "qwen3"), "--rm-type", "math"]
    words += ["--prompt-data", str(root / "dapo.jsonl"), "--num-rollout", "1", "--rollout-batch-size", "8"]
    words += ["--actor-num-nodes", "2", "--rollout-num-gpus-per-engine", "16", "--colocate"]
    with pytest.raises(ValueError, match=r"these are ray and embedded; use at most 8"):
        parse_args(words)
