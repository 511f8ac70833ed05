"""What is told about the machine: precision by what it can do, and sizes written for another one."""

import json

import pytest
from argument_helpers import parse

from slime.arguments.groups import cluster, precision
from slime.arguments.groups.precision import bfloat16_units

AMX = (True, "has amx_bf16")
OLD = (False, "has no amx_bf16, avx512_bf16")


@pytest.fixture
def laptop(monkeypatch):
    """`laptop(units, gpus, cores)`: the machine that the rules see."""

    def be(units=OLD, gpus=0):
        monkeypatch.setattr(cluster, "visible_gpus", lambda: gpus)
        monkeypatch.setattr(precision, "bfloat16_units", lambda: units)

    be()
    return be


def model(folder, **config):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


# ---- precision ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cpuinfo", "has", "how"),
    [
        ("flags\t\t: fpu avx2 avx512f avx512_vnni\n", False, "has no amx_bf16, avx512_bf16"),
        ("flags\t\t: fpu avx512f avx512_bf16 amx_bf16 amx_tile\n", True, "has amx_bf16, avx512_bf16"),
        ("flags\t\t: fpu avx512f avx512_bf16\n", True, "has avx512_bf16"),
        ("Features\t: fp asimd sve bf16 i8mm\n", True, "has bf16"),
        ("Features\t: fp asimd\n", False, "has no bf16, svebf16"),
        ("processor : 0\nhart : 1\n", False, "has no amx_bf16, avx512_bf16"),
        ("", False, "has no amx_bf16, avx512_bf16"),
    ],
)
def test_units_for_bfloat16_are_read_from_the_cpu(cpuinfo, has, how):
    assert bfloat16_units(cpuinfo) == (has, how)


def test_this_machine_answers():
    has, how = bfloat16_units()
    assert isinstance(has, bool) and how


@pytest.mark.parametrize(
    ("units", "stored", "dtype", "why"),
    [
        (OLD, {"dtype": "bfloat16"}, "float32", "this CPU has no amx_bf16, avx512_bf16"),
        (
            AMX,
            {"dtype": "bfloat16"},
            "bfloat16",
            "this CPU has amx_bf16, and the model is stored in bfloat16",
        ),
        (AMX, {"torch_dtype": "float16"}, "bfloat16", "stored in float16"),
        (AMX, {"text_config": {"dtype": "bfloat16"}}, "bfloat16", "stored in bfloat16"),
        (AMX, {"dtype": "float32"}, "float32", "stored in float32"),
        (AMX, {"dtype": {"": "bfloat16"}}, "float32", "unknown precision"),
    ],
)
def test_auto_is_what_the_cpu_can_do_and_the_model_holds(laptop, tmp_path, units, stored, dtype, why):
    laptop(units)
    args = parse(hf_checkpoint=model(tmp_path / "m", **stored))
    assert args.dtype == dtype
    assert args.sources["dtype"].startswith("derived: ") and why in args.sources["dtype"]


def test_a_model_on_the_hub_is_computed_in_float32_on_a_cpu(laptop):
    laptop(AMX)
    assert parse().dtype == "float32"


@pytest.mark.parametrize(("has_units", "dtype"), [(True, "bfloat16"), (False, "float32")])
def test_auto_on_gpus_asks_them(laptop, monkeypatch, has_units, dtype):
    laptop(gpus=1)
    monkeypatch.setattr("slime.utils.machine.accelerator.has_bfloat16", lambda: has_units)
    assert parse().dtype == dtype


def test_on_a_cluster_every_machine_decides_for_itself(laptop):
    assert parse(runtime="ray").dtype == "auto"


def test_a_precision_that_is_asked_for_is_kept_and_its_price_told(laptop):
    args = parse(dtype="bfloat16")
    assert args.dtype == "bfloat16"
    assert "has no amx_bf16, avx512_bf16" in args.warnings[0] and "slower" in args.warnings[0]
    laptop(AMX)
    assert parse(dtype="bfloat16").warnings == ()
    assert parse(dtype="float32").warnings == ()


# ---- sizes -------------------------------------------------------------------------------------------------


def test_nothing_is_told_of_ordinary_sizes_or_of_a_cluster(laptop):
    assert parse().warnings == ()
    assert parse(runtime="ray", colocate=True, num_gpus_per_node=8).warnings == ()


def test_a_cluster_in_the_environment_is_used_unless_the_command_line_says_otherwise(monkeypatch):
    assert parse().runtime == "local"
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    assert parse().runtime == "ray"
    assert parse(runtime="local").runtime == "local"
