"""Simulates small runs with random settings and faults, and checks the ledger's invariants after each.

The seed determines the loop, its settings and the time of each fault, so a failing seed fails every time.
"""

from __future__ import annotations

import random
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from slime.arguments import Args
from slime.arguments.groups.rollout import FULLY_ASYNC_ROLLOUT_FUNCTION
from slime.simulation.clock import Stalled
from slime.simulation.costs import Costs, EngineCost, TrainerCost
from slime.simulation.simulated_run import Measured, Simulation
from slime.simulation.simulated_settings import simulated_args
from slime.simulation.workload import Fault, FaultPlan, LengthModel, RewardModel, Workload
from slime.utils.errors import RunStopped
from slime.utils.machine.own_command import as_typed

_FILTER = "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"
_KINDS = ("engine", "trainer", "driver", "driver")


@dataclass(frozen=True, slots=True)
class Case:
    """Settings of one simulated run."""

    args: Args
    costs: Costs
    workload: Workload
    overlapped: bool
    words: str  # description in the report of a failure


@dataclass
class Found:
    """Results of all runs. `failures`: seed -> description of the failure."""

    runs: list[Measured] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)
    failures: dict[int, str] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def starts(self) -> int:
        return sum(run.num_starts for run in self.runs)

    def lines(self) -> list[str]:
        faults = ", ".join(f"{n} {kind}" for kind, n in sorted(self.kinds.items())) or "none"
        audits = [run.audit for run in self.runs if run.audit is not None]
        lines = [
            f"{len(self.runs)} runs in {self.seconds:.0f} s; faults: {faults}; {self.starts} starts, "
            f"{sum(audit.redone for audit in audits)} steps taken again, "
            f"{sum(audit.recalled for audit in audits)} samples from the ledger, "
            f"{sum(audit.num_samples for audit in audits)} samples trained, "
            f"{sum(run.error is not None for run in self.runs)} runs stopped by a rule of theirs",
        ]
        for seed, what in self.failures.items():
            lines.append(
                f"FAILED: seed {seed}: {what}\n  again: {as_typed('simulate', '--fuzz', 1, '--seed', seed)}"
            )
        return lines if self.failures else [*lines, "every one conserved its samples"]


def fuzz(args: Args, count: int, first_seed: int, log: Callable[[str], None] = lambda _: None) -> Found:
    found, started = Found(), time.monotonic()
    for seed in range(first_seed, first_seed + count):
        case = make_case(args, seed)
        problem, measured = run_case(case)
        found.runs.append(measured)
        found.kinds.update(fault.kind for fault in case.workload.faults.faults)
        if problem is not None:
            found.failures[seed] = f"{problem} ({case.words})"
            log(f"seed {seed}: {problem}")
        if len(found.runs) % 100 == 0:
            log(f"{len(found.runs)} of {count} runs, {len(found.failures)} failures")
    found.seconds = time.monotonic() - started
    return found


def run_case(case: Case) -> tuple[str | None, Measured]:
    """Run a case; return a description of its failure (None: it passed) and its measurements."""
    simulation = Simulation(case.args, case.costs, case.workload, overlapped=case.overlapped, keeps=True)
    try:
        measured = simulation.run()
    except RunStopped as error:
        if isinstance(error, Stalled):
            return f"a hang: {error}", simulation.measured
        simulation.measured.error = str(error)
        return None, simulation.measured
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__}: {error} ({where.filename}:{where.lineno})", simulation.measured
    audit = measured.audit
    if audit is not None and audit.violations:
        return "; ".join(audit.violations[:3]), measured
    oldest, bound = max(measured.staleness, default=0), case.args.max_weight_staleness
    if case.args.rollout_function_path == FULLY_ASYNC_ROLLOUT_FUNCTION and oldest > bound:
        return f"tokens of age {oldest} were trained on, but --max-weight-staleness is {bound}", measured
    expected = case.args.num_rollout or 0
    if measured.error is None and audit is not None and len(audit.steps) != expected:
        return f"{len(audit.steps)} steps were trained, {expected} were asked for", measured
    return None, measured


def make_case(args: Args, seed: int) -> Case:
    draw = random.Random(seed)
    loop = draw.choice(("sync", "async", "fully-async", "fully-async"))
    size = draw.randint(2, 4)
    changes: dict[str, Any] = {
        "rollout_batch_size": size,
        "n_samples_per_prompt": 2,
        "global_batch_size": 2 * size,
        "rollout_max_response_len": 16,
        "save_interval": draw.randint(1, 3),
        "keep_last_n": None,
        "rollout_num_gpus_per_engine": 1,
        "colocate": False,
        "sglang_server_concurrency": draw.randint(2, 8),
        "group_failure_action": "retry",
        "limits": {"group-attempts": 6},
        "reward_failure_action": draw.choice(("retry", "drop")),
        "dynamic_sampling_filter_path": _FILTER if draw.random() < 0.3 else None,
        "deterministic_mode": draw.random() < 0.2,
        "rollout_shuffle": False,
        "max_weight_staleness": draw.randint(1, 3) if loop == "fully-async" else 1,
        "update_weights_interval": 1,
        "max_restarts": draw.choice((0, 3, 3)),
    }
    if loop == "sync":
        changes["over_sampling_batch_size"] = size + draw.randint(0, 3)
        changes["partial_rollout"] = draw.random() < 0.5
    if loop == "fully-async":
        changes["rollout_function_path"] = FULLY_ASYNC_ROLLOUT_FUNCTION
    steps = draw.randint(3, 6)
    small = simulated_args(args.replace(**changes), steps=steps, unit=1, keeps=True)
    engines = draw.randint(1, 3)
    costs = Costs(
        engines,
        EngineCost(0.1, 0.01, 0.0, 0.001, draw.randint(1, 8)),
        TrainerCost(1, draw.uniform(0.1, 4.0), 0.001, push_s=0.1, save_s=draw.choice((0.0, 0.5))),
        pause_s=0.2,
    )
    faults = [
        Fault(draw.uniform(0.0, 5.0 * steps), draw.choice(_KINDS), draw.randrange(8))
        for _ in range(draw.randint(0, 4))
    ]
    workload = Workload(
        LengthModel("uniform", (1.0, 20.0), 16.0, seed),
        3.0,
        RewardModel(draw.choice((0.0, 0.5)), 0.5, draw.choice((0.0, 0.0, 0.05, 0.4)), seed),
        FaultPlan(tuple(sorted(faults, key=lambda f: f.at)), draw.uniform(0.5, 6.0), 2.0),
        unit=1,
        seed=seed,
    )
    about = {name: changes[name] for name in ("rollout_batch_size", "save_interval", "deterministic_mode")}
    struck = ", ".join(f"{fault.kind} at {fault.at:.2f} s" for fault in workload.faults.faults) or "no fault"
    return Case(small, costs, workload, loop != "sync", f"{loop}, {steps} steps, {about}, {struck}")
