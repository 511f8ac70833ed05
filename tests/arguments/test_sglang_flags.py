"""SGLang's own flags on our command line: asked from its interpreter, here a script that answers."""

import json
import sys
from types import SimpleNamespace

import pytest
from argument_helpers import parse

from slime.arguments.groups import topology
from slime.arguments.passthrough import sglang_flags
from slime.engines.sglang import rules

TABLE = {
    "version": "9.9.9",
    "flags": [
        {"options": ["--mem-fraction-static"], "dest": "mem_fraction_static", "nargs": None, "type": "float"},
        {"options": ["--sleep-on-idle"], "dest": "sleep_on_idle", "nargs": 0, "type": None},
        {"options": ["--tp-size", "--tensor-parallel-size"], "dest": "tp_size", "nargs": None, "type": "int"},
        {"options": ["--cuda-graph-bs"], "dest": "cuda_graph_bs", "nargs": "+", "type": "int"},
        {"options": ["--schedule-policy"], "dest": "schedule_policy", "nargs": None, "type": "str"},
        *(
            {
                "options": [f"--speculative-{name}"],
                "dest": f"speculative_{name}",
                "nargs": None,
                "type": "str",
            }
            for name in ("algorithm", "draft-model-path")
        ),
    ],
}


@pytest.fixture
def python(tmp_path, monkeypatch):
    """An interpreter stand-in that counts how often it is asked for the table."""
    for row in TABLE["flags"]:
        row |= {"choices": ["fcfs", "lpm"] if row["dest"] == "schedule_policy" else None, "help": ""}
    asked = tmp_path / "asked"
    script = tmp_path / "python"
    table = tmp_path / "table.json"
    table.write_text(json.dumps(TABLE))
    script.write_text(
        f'#!/bin/sh\ncase "$*" in *importlib.metadata*) echo 9.9.9;; '
        f'*--print-flags*) echo x >> {asked}; printf "SGLANG-FLAGS "; cat {table}; echo;; esac\n'
    )
    script.chmod(0o755)
    monkeypatch.setattr(sglang_flags, "_cache_folder", lambda: tmp_path)
    return script


def test_flags_of_sglang_become_words_of_its_command_line_and_values_of_args(python):
    words = [
        "--sglang-mem-fraction-static",
        "0.5",
        "--sglang-cuda-graph-bs",
        "1",
        "2",
        "--sglang-sleep-on-idle",
    ]
    args = parse(*words, sglang_python=str(python))
    assert args.rollout_engine == "sglang" and "flags of SGLang" in args.sources["rollout_engine"]
    assert args.sglang_options == [
        "--mem-fraction-static",
        "0.5",
        "--cuda-graph-bs",
        "1",
        "2",
        "--sleep-on-idle",
    ]
    assert (args.sglang_mem_fraction_static, args.sglang_cuda_graph_bs, args.sglang_sleep_on_idle) == (
        0.5,
        [1, 2],
        True,
    )


def test_the_table_is_asked_for_once_per_version(python, tmp_path):
    for _ in range(3):
        parse("--sglang-sleep-on-idle", sglang_python=str(python))
    assert (tmp_path / "asked").read_text() == "x\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--sglang-mem-fractoin-static", "1"], "9.9.9 has no .*did you mean --sglang-mem-fraction-static"),
        (["--sglang-mem-fraction-static", "much"], "'much': SGLang expects float"),
        (["--sglang-sleep-on-idle", "yes"], "is a switch and takes no value"),
        (["--sglang-schedule-policy", "magic"], "SGLang takes fcfs, lpm"),
    ],
)
def test_a_wrong_flag_of_sglang_is_explained(python, words, message):
    with pytest.raises(ValueError, match=message):
        parse(*words, sglang_python=str(python))


@pytest.mark.parametrize("name", ["tp-size", "tensor-parallel-size"])
def test_what_slime_decides_itself_is_left_out_and_told(python, name):
    words = [f"--sglang-{name}", "2", "--sglang-mem-fraction-static", "0.5"]
    args = parse(*words, sglang_python=str(python))
    assert args.sglang_options == ["--mem-fraction-static", "0.5"]
    told = f"--sglang-{name} is left out: --rollout-num-gpus-per-engine decides it."
    assert told in args.warnings


def test_flags_of_sglang_in_a_config_file_are_taken_and_the_command_line_wins(python, tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text("sglang-mem-fraction-static: 0.5\nsglang_sleep_on_idle: true\n")
    args = parse("--sglang-mem-fraction-static", "0.25", config=str(config), sglang_python=str(python))
    assert sorted(args.sglang_options) == ["--mem-fraction-static", "--sleep-on-idle", "0.25"]


def test_flags_of_sglang_beside_another_engine_are_refused():
    with pytest.raises(ValueError, match="--rollout-engine embedded starts no SGLang"):
        parse("--sglang-sleep-on-idle", rollout_engine="embedded")


def test_an_interpreter_without_sglang_is_named():
    with pytest.raises(ValueError, match="it has no SGLang"):
        parse("--sglang-sleep-on-idle", sglang_python=sys.executable)


def test_the_script_that_asks_for_the_flags_is_where_it_is_looked_for():
    assert sglang_flags._LAUNCH.is_file() and (sglang_flags._PACKAGE / "__init__.py").is_file()


def test_a_router_policy_is_for_the_router_that_is_there(monkeypatch):
    asked = {"rollout_engine": "embedded", "sglang_router_policy": "cache_aware"}
    (block,) = (w for w in parse(**asked).warnings if "--sglang-router-policy" in w)
    assert "--rollout-engine embedded uses slime's own balancer" in block
    draft = SimpleNamespace(
        sglang_router_policy="cache_aware", debug_train_only=False, rollout_router="sglang", idle=[],
        rollout_engine="sglang", rollout_external_engine_addrs=None, router_python=None, router_options={},
        sources={"router_options": "default"}, set=lambda name, value, source: setattr(draft, name, value),
    )  # fmt: skip
    monkeypatch.setattr(topology, "find_python", lambda *_: "python")
    topology._router_policy(draft)
    assert draft.router_options == {"--router-policy": ["cache_aware"]}
    monkeypatch.setattr(topology, "find_python", lambda *_: None)
    topology._router_policy(draft)
    assert "sglang-router is not installed" in draft.idle[0]


def test_in_deterministic_mode_a_machine_without_gpus_is_told_what_sglang_cannot_do(python, monkeypatch):
    def warned(gpus, **more):
        monkeypatch.setattr(rules, "visible_gpus", lambda: gpus)
        given = {"rollout_engine": "sglang", "sglang_python": str(python), **more}
        return " ".join(parse(**given).warnings)

    assert "SGLang has its deterministic mode on GPUs only" in warned(0, deterministic_mode=True)
    assert "deterministic" not in warned(1, deterministic_mode=True) + warned(0)
