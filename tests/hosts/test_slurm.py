"""The SLURM launcher on a real SLURM: a controller and two compute hosts, made of network namespaces."""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from loop_helpers import flags, make_world, metrics
from network_hosts import ROOT, Host, environment, network_hosts
from patience import eventually

pytestmark = pytest.mark.hosts

PROGRAMS = ("munged", "mungekey", "slurmctld", "slurmd", "sbatch", "scontrol")
CONFIG = """
ClusterName=test
SlurmctldHost=host0({address})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@contextlib.contextmanager
def slurm_on(hosts: list[Host], folder: Path) -> Iterator[dict[str, str]]:
    """Yield the environment of SLURM's commands; daemons end with it."""
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        pytest.skip(
            f"SLURM is not installed (apt-get install slurm-wlm munge): {', '.join(missing)} is missing"
        )
    folder.mkdir(mode=0o755)
    for name in ("state", *(f"spool-{host.name}" for host in hosts)):
        (folder / name).mkdir()
    line = "NodeName={0.name} NodeAddr={0.address} CPUs=2 State=UNKNOWN"
    nodes = "\n".join(line.format(host) for host in hosts)
    config = CONFIG.format(folder=folder, address=hosts[0].address, nodes=nodes)
    (folder / "slurm.conf").write_text(config)
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # a host has no cgroups of its own
    subprocess.run(["mungekey", "--create", f"--keyfile={folder}/key"], check=True)
    daemons: list[subprocess.Popen] = []
    with contextlib.ExitStack() as stack:

        def daemon(host: Host, *words: str) -> None:
            line = host.command("env", f"SLURM_CONF={folder}/slurm.conf", *words)
            process = subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
            stack.callback(process.wait)
            stack.callback(process.kill)
            daemons.append(process)

        files = (
            f"--key-file={folder}/key",
            f"--socket={folder}/munge.socket",
            f"--pid-file={folder}/munge.pid",
        )
        more = (f"--log-file={folder}/munge.log", f"--seed-file={folder}/seed")
        daemon(hosts[0], "munged", "--foreground", "--force", *files, *more)
        eventually(lambda: (folder / "munge.socket").exists())
        daemon(hosts[0], "slurmctld", "-D")
        for host in hosts:
            daemon(host, "slurmd", "-D", "-N", host.name)
        env = {"SLURM_CONF": f"{folder}/slurm.conf"}

        def ready() -> bool:
            assert all(process.poll() is None for process in daemons), (
                f"SLURM ended; its logs are in {folder}"
            )
            return hosts[0].run("sinfo", "-h", "-o", "%D %t", **env).stdout.split() == ["2", "idle"]

        eventually(ready)
        yield env


def submit(hosts: list[Host], env: dict[str, str], world: Path, run: str, **changes) -> tuple[str, str]:
    """Submit the launcher, wait for the end of its job; return the job's state and log."""
    sizes = {"rollout_num_gpus": 2, "actor_num_gpus_per_node": 1, **changes}
    (world / "run.yaml").write_text("{}\n")
    lines = (ROOT / "launchers/slurm.sbatch").read_text().splitlines(keepends=True)
    ours = [line for line in lines if "--gpus-per-node" not in line]
    assert len(ours) == len(lines) - 1
    (world / "slurm.sbatch").write_text("".join(ours))  # these hosts have none
    words = flags(world, run, **sizes)
    submitted = hosts[0].run(
        *("sbatch", "--parsable", "--cpus-per-task=1", "--overcommit", f"--output={world}/{run}.log"),
        *(str(world / "slurm.sbatch"), str(world / "run.yaml"), *words),
        cwd=str(ROOT),
        PATH=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        **{**environment(), **env},
    )
    job = submitted.stdout.strip().splitlines()[-1]
    assert submitted.returncode == 0 and job.isdigit(), submitted.stdout

    def ended() -> str | None:
        shown = hosts[0].run("scontrol", "show", "job", job, **env).stdout
        state = shown.partition("JobState=")[2].split()[0]
        return state if state not in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING") else None

    return eventually(ended), (world / f"{run}.log").read_text()


def test_a_job_trains_on_both_hosts_and_fails_with_its_run(tmp_path):
    world = tmp_path / "task"
    world.mkdir()
    make_world(world)
    with network_hosts(2, shared=tmp_path) as hosts, slurm_on(hosts, tmp_path / "slurm") as env:
        state, log = submit(hosts, env, world, "run", num_rollout=2)
        assert state == "COMPLETED", log[-6000:]
        assert len([row for row in metrics(world, "run") if "train/loss" in row]) == 2
        state, log = submit(hosts, env, world, "wrong", num_rollout=2, lr="fast")
        assert state == "FAILED" and "--lr" in log, log[-6000:]
