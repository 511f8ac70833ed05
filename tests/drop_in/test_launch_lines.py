"""Launch scripts of slime start as they are: what is derived and told, and the one reason of a refusal."""

import pytest
from launch_lines import MODELS, NOT_BUILT, RECIPES, SERVER_FLAGS, command_line, make_world

from slime.arguments import parse_args
from slime.arguments.passthrough import sglang_flags

pytest.importorskip("megatron")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    root = tmp_path_factory.mktemp("world")
    make_world(root)
    return root


@pytest.fixture
def root(world, monkeypatch):
    monkeypatch.setattr(sglang_flags, "_cache_folder", lambda: world)
    return world


# Every recipe with one model, every model with two recipes.
CASES = sorted(
    {("qwen3_moe", recipe) for recipe in RECIPES}
    | {(model, recipe) for model in MODELS for recipe in ("offloaded", "many nodes")}
)


@pytest.mark.parametrize(("model", "recipe"), CASES)
def test_a_launch_line_starts(root, model, recipe):
    args = parse_args(command_line(model, recipe, root))
    assert args.train_backend == ("fsdp" if model in NOT_BUILT else "megatron")
    assert not args.sequence_parallel
    assert args.ref_load in (None, args.hf_checkpoint)
    assert args.runtime == ("ray" if args.actor_num_nodes > 1 else "local")


def test_what_fsdp_cannot_do_for_a_family_of_its_own_is_refused_by_name(root):
    words = command_line("gpt_oss", "offloaded", root)
    layout = ["--pipeline-model-parallel-size", "2", "--context-parallel-size", "2"]
    args = parse_args([*words, *layout, "--moe-aux-loss-coeff", "0"])
    assert (args.pipeline_model_parallel_size, args.context_parallel_size) == (1, 1)
    (told,) = (text for text in args.warnings if text.startswith("--train-backend fsdp: "))
    assert "is a gpt_oss" in told and "--pipeline-model-parallel-size" in told
    with pytest.raises(ValueError, match=r"--hidden-dropout 0.1 changes what is trained"):
        parse_args([*words, "--hidden-dropout", "0.1"])
    with pytest.raises(ValueError, match="a family that --train-backend megatron does not build"):
        parse_args([*words, "--train-backend", "megatron"])


def test_all_refusals_come_at_once_and_grouped(root):
    """First those of what cannot be read, then those of settings that contradict each other."""
    words = [*command_line("qwen3", "colocated", root), "--fp16", "--use-opsm"]
    with pytest.raises(ValueError) as caught:
        parse_args(words)
    settings = str(caught.value)
    words += ["--learning-rate", "1", "--lr", "fast"]
    words += ["--sglang-mem-fraction-statik", "1", "--kl-lossy", "--num-generations", "4"]
    with pytest.raises(ValueError) as caught:
        parse_args(words)
    lines = str(caught.value).splitlines()
    assert lines[0] == "5 problems found; nothing was started."
    assert [line for line in lines[1:] if not line.startswith(" ")] == ["Command line:", "Flags of SGLang:"]
    assert settings.startswith("2 problems found; nothing was started.\nSettings:\n")
    for part in (
        "--learning-rate; it is called --lr here",
        "--num-generations; it is called --n-samples-per-prompt here",
        "--lr is 'fast': expected a number",
        "slime train --help` lists all flags",
        "did you mean --sglang-mem-fraction-static",
        "--fp16 cannot be given: --dtype decides it",
        "--use-opsm is set, but it has an effect only with --num-steps-per-rollout above 1",
    ):
        assert part in str(caught.value) + settings


def test_what_does_nothing_is_one_block_and_strict_refuses_it(root):
    words = command_line("qwen3", "debugged", root)
    args = parse_args(words)
    (block,) = (warning for warning in args.warnings if "nothing here" in warning)
    assert (
        block.startswith("these ")
        and "--wandb-group is qwen3, but it has an effect only with --use-wandb" in block
    )
    with pytest.raises(ValueError, match=r"--bf16 is set, but --dtype decides it. \(--strict\)"):
        parse_args([*words, "--strict"])


def test_names_of_other_sglang_releases_are_translated(root, tmp_path):
    args = parse_args(command_line("qwen3", "separate", root))
    assert "--cuda-graph-bs-decode" in args.sglang_options and args.sglang_cuda_graph_max_bs_decode == 64
    assert any("calls it --cuda-graph-max-bs-decode" in warning for warning in args.warnings)
    config = tmp_path / "run.yaml"
    config.write_text("sglang-disable-piecewise-cuda-graph: true\nsglang_enable_deepep_moe: true\n")
    args = parse_args([*command_line("qwen3", "colocated", root), "--config", str(config)])
    assert "--disable-prefill-cuda-graph" in args.sglang_options
    assert args.sglang_moe_a2a_backend == "deepep"
    topology = tmp_path / "topology.yaml"
    group = "{num_gpus: 8, num_gpus_per_engine: 2, overrides: {cuda_graph_max_bs: 4}}"
    topology.write_text(f"sglang: [{{name: a, server_groups: [{group}]}}]\n")
    args = parse_args([*command_line("qwen3", "colocated", root), "--sglang-config", str(topology)])
    assert args.engine_topology.policy.groups[0].overrides == {"cuda_graph_max_bs_decode": 4}


def test_a_trained_megatron_checkpoint_is_never_replaced(root):
    (root / "qwen3_slime").mkdir(exist_ok=True)
    tracker = root / "qwen3_slime" / "latest_checkpointed_iteration.txt"
    tracker.write_text("120")
    with pytest.raises(ValueError, match=r"--load is .*qwen3_slime/, a checkpoint in Megatron's format"):
        parse_args(command_line("qwen3", "colocated", root))
    tracker.unlink()


def test_values_of_a_plug_in_file_are_never_without_effect(root, tmp_path):
    file = tmp_path / "mis.yaml"
    file.write_text("use_rs: false\nrs_upper: 3.0\ntis_level: geometric\n")
    args = parse_args([*command_line("qwen3", "colocated", root), "--custom-config-path", str(file)])
    assert (args.rs_upper, args.tis_level) == (3.0, "geometric")


def test_the_settings_of_the_mismatch_helper_reach_its_function(root, tmp_path):
    file = tmp_path / "mis.yaml"
    file.write_text(
        "use_tis: true\ntis_level: token\ntis_mode: truncate\ntis_lower_bound: 0.5\ntis_upper_bound: 2.0\n"
        "tis_batch_normalize: true\nuse_rs: true\nrs_level: token\nrs_lower_bound: null\n"
        "rs_upper_bound: null\nrs_veto_threshold: 1.0e-4\n"
    )
    words = [*command_line("qwen3", "colocated", root), "--custom-config-path", str(file)]
    args = parse_args([*words, "--custom-tis-function-path", "mis.compute_mis_weights_with_cp"])
    assert (args.use_tis, args.use_rs, args.tis_upper_bound, args.rs_veto_threshold) == (
        True,
        True,
        2.0,
        1e-4,
    )
    assert args.rs_lower_bound is None and not any("tis" in warning for warning in args.warnings)


@pytest.mark.slow
def test_new_names_are_those_of_the_installed_sglang():
    python = sglang_flags.find_python(None)
    if python is None:
        pytest.skip("SGLang is not installed (make sglang-env)")
    table = sglang_flags.server_flags(python)
    for old in ("cuda-graph-max-bs", "cuda-graph-bs", "disable-piecewise-cuda-graph", "nsa-prefill-backend"):
        assert f"--{old}" in table.by_option or table.translate(f"--sglang-{old}"), old
    for name, _, _ in SERVER_FLAGS:
        assert f"--{name}" in table.by_option or table.translate(f"--sglang-{name}"), name
