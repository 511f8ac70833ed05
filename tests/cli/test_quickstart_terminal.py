"""The quick start on a real terminal: one live line per
phase, log lines in a file, everything within the width.
"""

import pytest
import warm_start
from terminal import run_in_terminal

# The quick start as it is, with a loop that only logs and writes metrics: the screen is what is tested.
CHILD = (
    warm_start.WARM
    + """
import contextlib, json, logging, os, shutil, sys, warnings
from pathlib import Path
from slime.cli.quickstart import command
from slime.observability.logging_utils import configure_logger

def loop(args):
    configure_logger()
    logger = logging.getLogger("slime.cluster.cluster")
    folder = Path(args.run_dir)
    folder.mkdir(parents=True)
    rl = folder.name == "rl"
    num_steps = args.num_rollout if rl else 400
    with open(folder / "metrics.jsonl", "w", buffering=1) as metrics:
        for step in range(num_steps):
            values = "loss 0.1, grad_norm 2.5, entropy_loss 4.5, train_rollout_logprob_abs_diff 2e-7"
            logger.info("train %d: LOGLINE %s", step, values)
            warnings.warn("LOGLINE of a library %d" % step)
            sys.stderr.write("LOGLINE of a progress bar\\r")
            os.write(2, b"LOGLINE of C++\\n")
            if rl and step % args.eval_interval == 0 or rl and step == num_steps - 1:
                row = {"step": step, "eval/heldout_greedy": 0.5, "eval/heldout_sampled": 0.4}
                metrics.write(json.dumps(row) + "\\n")
            row = {"step": step, "rollout/raw_reward" if rl else "train/loss": step / num_steps}
            metrics.write(json.dumps(row) + "\\n")
    if not rl:
        shutil.copytree(folder.parent / "model", folder / "hf-19")
    print("a line that a plug-in prints")

command.run_loop = command.run_overlapped = loop
command.warm_starts = contextlib.nullcontext  # the loop starts nothing
sys.exit(command.main(["--run-dir", sys.argv[1]]))
"""
)


# The narrow one is where lines are cut and flooded first; the wide one is among the slow tests.
@pytest.mark.parametrize(("columns", "rows"), [(80, 24), pytest.param(120, 40, marks=pytest.mark.slow)])
def test_the_live_line_is_not_flooded_by_log_lines(tmp_path, columns, rows):
    shown = run_in_terminal("-c", CHILD, str(tmp_path / "run"), columns=columns, rows=rows)
    assert shown.code == 0, shown.written
    assert "LOGLINE" not in shown.written
    assert "INFO" not in shown.written
    log = (tmp_path / "run" / "log.txt").read_text()
    for kind in ("train 49: LOGLINE", "LOGLINE of a library", "LOGLINE of a progress bar", "LOGLINE of C++"):
        assert kind in log
    lines = shown.lines()
    for title, steps, value in (("SFT", "400/400", "loss 0.998"), ("RL", "50/50", "reward 0.980")):
        [line] = [
            line for line in lines if line.startswith(title + " ")
        ]  # redrawn in place, not once per step
        assert steps in line and value in line, line
        assert "…" not in line, line
    assert "held-out 50.0%" in next(line for line in lines if line.startswith("RL "))
    assert any("Held-out accuracy" in line for line in lines)
    assert "a line that a plug-in prints" in "\n".join(lines)


def test_a_mistake_is_told_on_the_terminal_and_not_in_the_log(tmp_path):
    words = ("-m", "slime", "quickstart", "--run-dir", str(tmp_path / "run"), "--lr", "abc")
    shown = run_in_terminal(*words, columns=80, rows=24)
    assert shown.code == 2
    told = [line for line in shown.lines() if line]
    assert told[0].startswith("error: ") and "--lr is 'abc'" in "\n".join(told) and len(told) <= 6
    assert not (tmp_path / "run").exists()
