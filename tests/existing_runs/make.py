"""Makes the stored runs that later versions must resume: one tar.gz for each kind of loop.

    python tests/existing_runs/make.py NAME      # writes NAME-train.tar.gz and NAME-train_async.tar.gz

Each run has a model of a few thousand parameters, takes four steps, saves after every second one and is
killed (SIGKILL) when its fourth step begins. It then has a checkpoint of two steps, two complete batches in
its ledger that no checkpoint covers, and no recorded end. An archive holds the model, the prompts, the
reward, the run folder without its logs, the checkpoint, and `command.json`: the script and the flags that
started the run.

All paths of the command are relative to the folder of the archive. Where a run wrote the absolute path of
that folder, in run.json, the archive has `FOLDER` in its place; `unpack` puts the new folder there. Archives
are written once and stay as they are: run this script again only to add the runs of a later version, under
another NAME.
"""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LOOPS = ("train.py", "train_async.py")
PLACEHOLDER = "FOLDER"
NUM_ROLLOUT, SAVED = 4, 2
KILL = [{"point": "step", "nth": NUM_ROLLOUT, "delay_s": 0, "target": "driver"}]
FLAGS = """
    --hf-checkpoint model --prompt-data prompts.jsonl --label-key label --custom-rm-path reward.py:reward
    --rollout-batch-size 2 --n-samples-per-prompt 2 --global-batch-size 4 --rollout-max-response-len 6
    --num-rollout 4 --rollout-shuffle --lr 1e-3 --use-dynamic-batch-size --max-tokens-per-gpu 256
    --eval-interval 2 --eval-prompt-data held eval.jsonl --deterministic-mode --dtype float32
    --trainer-threads 1 --engine-threads 1 --save checkpoints --save-interval 2 --run-dir run
"""


def unpack(archive: Path, folder: Path) -> dict[str, list[str]]:
    """Put a stored run into `folder`, as if it had run there, and return the command that started it."""
    with tarfile.open(archive) as file:
        file.extractall(folder, filter="data")
    settings = folder / "run" / "run.json"
    settings.write_text(settings.read_text().replace(PLACEHOLDER, str(folder)))
    command: dict[str, list[str]] = json.loads((folder / "command.json").read_text())
    return command


def make(script: str, archive: Path, folder: Path) -> None:
    """Run `script` in `folder` until it is killed, and pack what it left."""
    _make_world(folder)
    (folder / "command.json").write_text(json.dumps({"script": script, "flags": FLAGS.split()}))
    victim = [sys.executable, str(ROOT / "tests" / "crash" / "victim.py"), json.dumps(KILL), os.devnull]
    search = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support")])
    ended = subprocess.run(
        [*victim, script, *FLAGS.split()],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": search, "OMP_NUM_THREADS": "1"},
    )
    assert ended.returncode == -9, f"the run should have been killed, and ended with {ended.returncode}"
    assert len(list((folder / "checkpoints").glob("step_*/manifest.json"))) == 1
    settings = folder / "run" / "run.json"
    settings.write_text(settings.read_text().replace(str(folder), PLACEHOLDER))
    shutil.rmtree(folder / "run" / "logs")
    with tarfile.open(archive, "w:gz") as file:
        for path in sorted(folder.iterdir()):
            file.add(path, path.name, filter=_anonymous)


def _make_world(folder: Path) -> None:
    sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT)]
    from tiny_model import make_tiny_model

    make_tiny_model(folder / "model", layers=1, hidden=16, tie_word_embeddings=True)
    rows = [json.dumps({"input": f"say a {i}", "label": str(i)}) + "\n" for i in range(12)]
    (folder / "prompts.jsonl").write_text("".join(rows))
    (folder / "eval.jsonl").write_text("".join(rows[:2]))
    (folder / "reward.py").write_text(
        "async def reward(args, sample, **kwargs):\n"
        '    return sample.response.count("a") / max(1, sample.response_length) + 0.01 * (sample.index % 7)\n'
    )


def _anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry


if __name__ == "__main__":
    for loop in LOOPS:
        with tempfile.TemporaryDirectory() as scratch:
            make(loop, HERE / f"{sys.argv[1]}-{Path(loop).stem}.tar.gz", Path(scratch).resolve())
