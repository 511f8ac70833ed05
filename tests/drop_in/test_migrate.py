"""`slime migrate`: what a launch script amounts to, without running any of it."""

import json
import shutil

import pytest
import yaml
from launch_lines import make_world

from slime.cli.main import main

MODEL = """
NLAYERS=4
arr=()
for ((i=0; i<NLAYERS; i++)); do
  if (( i < 1 )); then arr+=(0); else arr+=(1); fi
done
printf -v MOE_LAYER_FREQ "[%s]" "$(IFS=', '; echo "${arr[*]}")"
MODEL_ARGS=( --swiglu --num-layers 4 --moe-layer-freq "$MOE_LAYER_FREQ" --no-rope-fusion )
"""
SCRIPT = """#!/bin/bash
pkill -9 nothing-of-this-name
touch ROOT/touched
echo words > ROOT/written
/usr/bin/touch ROOT/touched
FOO=1 touch ROOT/touched
FOO=$(date) touch ROOT/touched
FOO=a"b c"'d' BAR=`date +%s` touch ROOT/touched
FOO="$(echo ") ' \"x\"")" A[1]=2 touch ROOT/touched
FOO=( 1 2 ) touch ROOT/touched
FOO+=x touch ROOT/touched
/usr/bin/env=x touch ROOT/touched
command date > ROOT/written
kill -9 $$
set -ex
NVLINK_COUNT=$(nvidia-smi topo -m 2>/dev/null | grep -o 'NV[0-9][0-9]*' | wc -l)
if [ "$NVLINK_COUNT" -gt 0 ]; then HAS_NVLINK=1; else HAS_NVLINK=0; fi
if [ -z "${DATA_FOLDER}" ]; then echo "not set"; exit 1; fi
SCRIPT_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
source "${SCRIPT_DIR}/models/model.sh"
CKPT_ARGS=(
   --hf-checkpoint ROOT/qwen3
   #--hf-checkpoint /another
   --ref-load ROOT/qwen3_torch_dist
)
ROLLOUT_ARGS=(
   --prompt-data ${DATA_FOLDER}/dapo.jsonl --rollout-batch-size ${BATCH:-16} --n-samples-per-prompt 8
   --num-rollout 10 --rollout-max-response-len 100 --lr 1e-6
)
SGLANG_ARGS=(
   --rollout-num-gpus-per-engine 1 --sglang-cuda-graph-bs 1 2 $(seq 4 4 8) --sglang-python ROOT/python
)
ray start --head --num-gpus 8
TRAIN
"""
EXPECTED = {
    "swiglu": True,
    "num-layers": 4,
    "moe-layer-freq": "[0,1,1,1]",
    "no-rope-fusion": True,
    "rollout-batch-size": 16,
    "lr": "1e-6",
    "sglang-cuda-graph-bs": [1, 2, 4, 8],
    "colocate": True,
}
FLAGS = '--colocate ${MODEL_ARGS[@]} ${CKPT_ARGS[@]} ${ROLLOUT_ARGS[@]} "${SGLANG_ARGS[@]}"'
LAUNCHER = """
import slime.utils.external_utils.command_utils as U

def prepare():
    U.exec_command("touch ROOT/touched")
    U.convert_checkpoint(model_name="a", megatron_model_type="b", num_gpus_per_node=8)

if __name__ == "__main__":
    prepare()
    U.execute_train(train_args="--hf-checkpoint ROOT/qwen3 " f"--rollout-batch-size {2 * 8} --colocate ",
                    num_gpus_per_node=8, megatron_model_type="qwen3-4B", train_script="train_async.py")
"""


@pytest.fixture
def root(tmp_path, monkeypatch):
    make_world(tmp_path)
    monkeypatch.setattr("slime.arguments.passthrough.sglang_flags._cache_folder", lambda: tmp_path)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "model.sh").write_text(MODEL)
    return tmp_path


def migrate(root, capsys, name, text):
    (root / name).write_text(text.replace("ROOT", str(root)))
    code = main(["migrate", str(root / name)])
    assert not (root / "touched").exists() and not (root / "written").exists()
    shown = capsys.readouterr().out
    return code, shown, yaml.safe_load(shown)


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("train", "command"),
    [
        (f"ray job submit --address=x --runtime-env-json='{{}}' -- python3 train.py {FLAGS}", "slime train"),
        (f"PYTHONPATH=/a python3 train_async.py {FLAGS} > ROOT/written 2>&1", "slime train-async"),
        (f"nohup slime train {FLAGS} | tee ROOT/written", "slime train"),
    ],
)
def test_a_bash_script_becomes_settings_and_nothing_of_it_happens(root, capsys, train, command, monkeypatch):
    monkeypatch.delenv("DATA_FOLDER", raising=False)
    code, shown, settings = migrate(root, capsys, "run.sh", SCRIPT.replace("TRAIN", train))
    assert code == 0 and f"{command} --config run.yaml" in shown
    assert settings["prompt-data"] == "${DATA_FOLDER}/dapo.jsonl"  # nothing sets it: left as it is written
    assert {name: settings[name] for name in EXPECTED} == EXPECTED
    pytest.importorskip("megatron.core", reason="without megatron-core its flags are what is refused")
    assert "# refused on this machine: prompt-data in run.yaml is '${DATA_FOLDER}/dapo.jsonl'" in shown


WORDS = "--lr 1e-6 --num-rollout 1_000"
HOSTILE = {
    "eval": f'A="{WORDS}"; source /no/models/file.sh\neval "python3 train.py $A"',
    "one string": f'A="python3 train.py"\nA+=" {WORDS}"\n$A 2>&1 | tee ROOT/written',
    "inner shell": f'run() {{ srun -N1 bash -c "python3 train.py $*"; }}\nrun {WORDS}',
    "after a folder": f"cd /no/slime && A=b uv run python -u train.py \\\n {WORDS} &\nwait",
    "shell in ray": f'ray job submit -- bash -lc "touch ROOT/touched; python3 train.py {WORDS}"',
    "comments": "A=(\n --lr 1e-6 # a note\n #--lr 2\n --num-rollout=${N:-1_000}\n)\n"
    "timeout 9 python3 ./train.py ${A[@]}",
    "set by default": ': "${N:=1_000}"\n[[ -n "$MORE" ]] && M=(--seed $MORE)\n'
    "python train.py --lr 1e-6 --num-rollout $N ${M[@]}",
    "heredoc": "cat > ROOT/written <<EOF\npython3 train.py\nEOF\nread -r -d '' A <<'EOF'\n--lr 1e-6\nEOF\n"
    "set -ex; pkill -9 sglang; python3 train.py $A --num-rollout 1_000",
}


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize("idiom", HOSTILE)
def test_idioms_of_bash_are_followed_and_nothing_of_them_happens(root, capsys, idiom, monkeypatch):
    monkeypatch.setattr("slime.cli.migrate._notes", lambda text: [])
    code, _, settings = migrate(root, capsys, "run.sh", HOSTILE[idiom])
    assert code == 0 and settings == {"lr": "1e-6", "num-rollout": "1_000"}


def test_words_for_the_script_are_its_arguments(root, capsys, monkeypatch):
    monkeypatch.setattr("slime.cli.migrate._notes", lambda text: [])
    (root / "run.sh").write_text('python3 train.py --hf-checkpoint $1 "${@:2}"')
    assert main(["migrate", str(root / "run.sh"), "a/b", "--lr", "1"]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == {"hf-checkpoint": "a/b", "lr": 1}


def test_a_python_launcher_becomes_settings(root, capsys):
    code, shown, settings = migrate(root, capsys, "run.py", LAUNCHER)
    assert code == 0 and "slime train-async --config run.yaml" in shown
    assert settings == {
        "train-backend": "megatron",
        "hf-checkpoint": f"{root}/qwen3",
        "rollout-batch-size": 16,
        "colocate": True,
    }


def test_a_script_without_training_says_so(root, capsys):
    (root / "run.sh").write_text("echo hello\n")
    with pytest.raises(SystemExit):
        main(["migrate", str(root / "run.sh")])
    assert "contains no known training command" in capsys.readouterr().err


def test_a_python_launcher_runs_the_training(tmp_path, monkeypatch):
    from slime.cli import launch

    (tmp_path / "my_train.py").write_text(
        "import json, os, sys\n"
        f"json.dump([sys.argv[1:], os.environ['A'], os.environ['B']], open({str(tmp_path / 'out')!r}, 'w'))\n"
    )
    monkeypatch.setenv("KEY", "k")
    launch.execute_train(
        train_args="--lr 1 --wandb-key '${KEY}'",
        num_gpus_per_node=8,
        megatron_model_type="x",
        train_script=str(tmp_path / "my_train.py"),
        extra_env_vars={"A": "1"},
        config=launch.ExecuteTrainConfig(extra_env_vars="B=2"),
    )
    words = ["--train-backend", "megatron", "--lr", "1", "--wandb-key", "k", "--num-gpus-per-node", "8"]
    assert json.loads((tmp_path / "out").read_text()) == [words, "1", "2"]


# -- what could not be evaluated is reported


def reported(root, capsys, monkeypatch, text, *words, name="scripts/run.sh", start=None):
    """Settings of a script, and what was said about it above them and on the terminal."""
    monkeypatch.setattr("slime.cli.migrate._notes", lambda text: [])
    file = root / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(text.replace("ROOT", str(root)))
    monkeypatch.chdir(start or root)
    assert main(["migrate", str(file), *words]) == 0
    shown = capsys.readouterr()
    comments = [line for line in shown.out.splitlines()[1:] if line.startswith("#")]
    assert [line.removeprefix("# ") for line in comments] == shown.err.splitlines(), "told in both places"
    return yaml.safe_load(shown.out), "\n".join(comments)


COMMANDS = {
    "in the flag": ("--wandb-group a-$(git rev-parse HEAD)", "wandb-group", "a-$(git rev-parse HEAD)", "git"),
    "in a variable": ("G=$(hostname)\n--wandb-group $G", "wandb-group", "$(hostname)", "hostname"),
    "in backticks with words": ("G=`git log -1`\n--save /out/$G/x", "save", "/out/$(git log -1)/x", "git"),
    "in backticks": ("G=`whoami`\n--save /out/$G/x", "save", "/out/$(whoami)/x", "whoami"),
    "of python": (
        'N=$(python3 -c "print(3)")\n--num-rollout $N',
        *("num-rollout", '$(python3 -c "print(3)")', "python3"),
    ),
    "counted": (
        "N=$(nvidia-smi -L | wc -l)\n--num-gpus-per-node $N",
        "num-gpus-per-node",
        "$(...)",
        "nvidia-smi",
    ),
    "computed": (
        "N=$(nproc)\nM=$((N * 2))\n--num-gpus-per-node $M",
        *("num-gpus-per-node", "$(...)", "nproc"),
    ),
    "read": ("read -r G < <(git branch)\n--wandb-group $G", "wandb-group", "$(git branch)", "git"),
    "decided": ('[ "$(nproc)" -gt 1 ] && S=5 || S=6\n--seed $S', "seed", "$(...)", "nproc"),
}


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize("idiom", COMMANDS)
def test_a_value_of_a_command_that_is_not_run_is_named(root, capsys, monkeypatch, idiom):
    text, flag, value, command = COMMANDS[idiom]
    *before, flags = text.split("\n")
    script = "\n".join([*before, f"python3 train.py --lr 1e-6 {flags}"])
    settings, comments = reported(root, capsys, monkeypatch, script)
    assert settings == {"lr": "1e-6", flag: value}
    assert f"{flag} could not be evaluated" in comments and f"`{command}" in comments and "line 1" in comments
    assert "lr" not in comments.replace("url", "")


def test_values_of_harmless_commands_are_known(root, capsys, monkeypatch):
    script = (
        'R=$((RANDOM % 100))\nD=$(basename "$(dirname /a/b/c)")-$(date +%s%N)-$R\nnvidia-smi | tee x\n'
        "T=`cat /no/such/file 2>/dev/null || echo none`\nU=$(hostname)\n"
        "python3 train.py --save /out/$D --wandb-group $T-$$"
    )
    settings, comments = reported(root, capsys, monkeypatch, script)
    assert settings["save"].startswith("/out/b-1") and settings["wandb-group"].startswith("none-")
    assert comments == ""


USAGE = """
usage() { echo "Usage: $0 MODEL SAVE" >&2; exit 1; }
[[ $# -ne 2 ]] && usage
python3 train.py --hf-checkpoint $1 --save ../$1/$2
"""


def test_a_script_that_ends_with_its_usage_is_reported_with_its_arguments(root, capsys, monkeypatch):
    settings, comments = reported(root, capsys, monkeypatch, USAGE)
    assert settings == {"hf-checkpoint": "${1}", "save": "../${1}/${2}"}
    assert "line 2: the script ends here (exit 1)" in comments
    assert "save could not be evaluated" in comments and "migrate" in comments and "A B" in comments
    settings, comments = reported(root, capsys, monkeypatch, USAGE, "a/b", "c")
    assert settings == {"hf-checkpoint": "a/b", "save": "../a/b/c"} and comments == ""


def test_arguments_that_nobody_checks_stay_as_they_are_written(root, capsys, monkeypatch):
    script = 'python3 train.py --save ../$1/$2 --seed ${3:-5} --hf-checkpoint m "${@:4}"'
    settings, comments = reported(root, capsys, monkeypatch, script)
    assert settings == {"save": "../${1}/${2}", "seed": 5, "hf-checkpoint": "m"}
    assert "save could not be evaluated" in comments and "slime migrate " in comments
    assert reported(root, capsys, monkeypatch, script, "a", "b") == (
        {"save": "../a/b", "seed": 5, "hf-checkpoint": "m"},
        "",
    )


def test_an_end_that_depends_on_the_machine_is_told(root, capsys, monkeypatch):
    script = "if [ ! -d /no/such/folder ]; then exit 3; fi\npython3 train.py --lr 1e-6"
    settings, comments = reported(root, capsys, monkeypatch, script)
    assert settings == {"lr": "1e-6"} and "line 1: the script ends here (exit 3) on this machine" in comments


MODELS = "source scripts/models/m.sh\npython3 train.py ${MODEL_ARGS[@]} --lr 1e-6"


@pytest.mark.parametrize("start", [".", "scripts", "elsewhere"])
def test_model_files_are_found_from_the_folder_that_scripts_are_started_in(root, capsys, monkeypatch, start):
    (root / "elsewhere").mkdir()
    (root / "scripts" / "models").mkdir(parents=True)
    (root / "scripts" / "models" / "m.sh").write_text("declare -a MODEL_ARGS=( --num-layers 4 )\n")
    settings, comments = reported(root, capsys, monkeypatch, MODELS, start=root / start)
    assert settings == {"num-layers": 4, "lr": "1e-6"} and comments == ""


def test_a_model_file_that_is_nowhere_is_named(root, capsys, monkeypatch):
    settings, comments = reported(root, capsys, monkeypatch, MODELS)
    assert settings == {"lr": "1e-6"}
    assert "line 1: scripts/models/m.sh could not be read" in comments


def test_the_name_of_the_script_is_its_own(root, capsys, monkeypatch):
    (root / "scripts" / "models").mkdir(parents=True)
    (root / "scripts" / "models" / "m.sh").write_text("MODEL_ARGS=( --num-layers 4 )\n")
    script = 'cd "$(dirname "$0")/.." && ' + MODELS
    (root / "elsewhere").mkdir()
    settings, comments = reported(root, capsys, monkeypatch, script, start=root / "elsewhere")
    assert settings == {"num-layers": 4, "lr": "1e-6"} and comments == ""


def test_a_launcher_that_runs_commands_by_any_name_runs_none(root, capsys):
    text = "from slime.utils.misc import exec_command\nexec_command('touch ROOT/touched')\n" + LAUNCHER
    code, _, settings = migrate(root, capsys, "run.py", text)
    assert code == 0 and settings["rollout-batch-size"] == 16


def test_a_script_that_never_ends_is_told(root, capsys, monkeypatch):
    monkeypatch.setattr("slime.cli.bash_scripts._LIMIT_S", 1)
    (root / "run.sh").write_text("while :; do :; done\npython3 train.py --lr 1\n")
    with pytest.raises(SystemExit):
        main(["migrate", str(root / "run.sh")])
    assert "it may wait for a skipped command" in capsys.readouterr().err
