"""The check pool with real processes: values, failures, a hanging check, and death with the parent."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from patience import LONG_S, PATIENCE_S, eventually, longer_each_time

from slime.rollout.rm_hub.workers.check_pool import CheckPool
from slime.utils.reward_failure import ComparisonTooLarge, RewardFailure

ROOT = Path(__file__).parents[2]


@pytest.fixture
def pool():
    """Its deadline decides nothing: what ends a check is something else, or `late_after`."""
    pool = CheckPool(num_workers=1, deadline_s=PATIENCE_S)
    yield pool
    pool.close()


def late_after(pool, seconds, *check):
    """What a check gives that has so long; those before and behind it have all the time they need."""
    pool.deadline_s = seconds
    try:
        return asyncio.run(pool.check(*check))
    finally:
        pool.deadline_s = PATIENCE_S


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # gone, or going while it is read
        return False


def test_value_comes_back_and_the_worker_is_reused(pool):
    async def main():
        return [
            await pool.check("operator:add", 2, 3),
            await pool.check("os:getpid"),
            await pool.check("os:getpid"),
        ]

    total, first, second = asyncio.run(main())
    assert total == 5
    assert first == second != os.getpid()


def test_no_process_exists_before_the_first_check(pool):
    assert [worker.process for worker in pool._workers] == [None]


def test_pool_serves_a_second_event_loop(pool):
    assert asyncio.run(pool.check("operator:mul", 2, 3)) == 6
    assert asyncio.run(pool.check("operator:mul", 2, 4)) == 8


def test_hanging_check_is_killed_at_the_deadline_and_the_pool_stays_usable(pool):
    first = asyncio.run(pool.check("os:getpid"))
    start = time.monotonic()
    # Catastrophic backtracking: one C call that holds the interpreter for longer than anyone will wait.
    failure = late_after(pool, 1.0, "re:match", r"(a+)+$", "a" * 60 + "b")
    assert time.monotonic() - start < LONG_S
    assert isinstance(failure, RewardFailure) and failure.kind == "invalid"
    assert failure.reason.startswith("timeout") and "--timeouts reward=1" in failure.reason
    assert not is_running(first)
    second = asyncio.run(pool.check("os:getpid"))
    assert second != first


def test_queued_checks_survive_a_hanging_neighbour(pool):
    async def main():
        return await asyncio.gather(
            pool.check("time:sleep", 1000), *(pool.check("operator:add", i, 1) for i in range(5))
        )

    for pool.deadline_s in longer_each_time(1.0):  # the others have no longer
        hung, *rest = asyncio.run(main())
        assert hung.kind == "invalid"
        if rest == [1, 2, 3, 4, 5]:
            break
    assert rest == [1, 2, 3, 4, 5]


def test_raising_check_is_invalid_with_the_exception(pool):
    failure = asyncio.run(pool.check("operator:truediv", 1, 0))
    assert failure.kind == "invalid" and "ZeroDivisionError" in failure.reason


def test_missing_function_is_an_infra_error_naming_it(pool):
    failure = asyncio.run(pool.check("no_such_module:f"))
    assert failure.kind == "infra_error" and "no_such_module" in failure.reason


def test_worker_that_dies_is_an_infra_error_that_says_how_and_is_replaced(pool, caplog):
    failure = asyncio.run(pool.check("os:abort"))
    assert failure.kind == "infra_error" and "lost its worker, which (pid " in failure.reason
    assert "while it ran os:abort; a new one replaces it" in caplog.text
    assert asyncio.run(pool.check("operator:add", 1, 1)) == 2


def test_worker_killed_while_idle_is_replaced(pool):
    pid = asyncio.run(pool.check("os:getpid"))
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: not is_running(pid))
    assert asyncio.run(pool.check("operator:add", 1, 1)) == 2


@pytest.mark.parametrize("size", [1, 1_000_000])  # the second does not fit into a pipe that nobody reads
def test_worker_that_is_stopped_while_idle_is_noticed_within_the_deadline_and_replaced(pool, size):
    pid = asyncio.run(pool.check("os:getpid"))
    asyncio.run(pool.check("builtins:len", "x"))
    os.kill(pid, signal.SIGSTOP)
    start = time.monotonic()
    failure = late_after(pool, 1.0, "builtins:len", "x" * size)
    assert time.monotonic() - start < LONG_S  # the deadline is 1 s; it used to be 120 s
    assert failure.kind == "infra_error"
    eventually(lambda: not is_running(pid))
    assert asyncio.run(pool.check("builtins:len", "x" * size)) == size


def test_worker_that_is_stopped_within_a_check_is_not_the_answer_s_fault(pool):
    for seconds in longer_each_time(1.0):
        failure = late_after(pool, seconds, "os:kill", 0, signal.SIGSTOP)  # its own process group
        if failure.kind == "infra_error":
            break
        assert failure.reason.startswith("timeout"), "late, and not yet stopped"
    assert "stopped from outside" in failure.reason
    assert asyncio.run(pool.check("operator:add", 1, 1)) == 2


def test_check_that_computes_for_too_long_is_broken_off_by_its_cpu_time(pool):
    failure = asyncio.run(pool.check("builtins:eval", "[i for i in iter(int, 1)]"))
    assert isinstance(failure, ComparisonTooLarge) and "1 s of CPU time" in failure.reason
    assert asyncio.run(pool.check("operator:add", 1, 1)) == 2


def test_check_that_recurses_or_takes_all_memory_is_too_large(pool):
    deep = "(lambda f: f(f))(lambda f: f(f))"
    failure = asyncio.run(pool.check("builtins:eval", deep))
    assert isinstance(failure, ComparisonTooLarge) and "RecursionError" in failure.reason
    failure = asyncio.run(pool.check("builtins:eval", "bytes(1 << 40)"))
    assert isinstance(failure, ComparisonTooLarge) and "memory" in failure.reason
    assert asyncio.run(pool.check("operator:add", 1, 1)) == 2


def test_checks_run_where_the_machine_gives_less_memory_than_their_limit():
    code = (
        "import asyncio, resource; resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))\n"
        "from slime.rollout.rm_hub.workers.check_pool import CheckPool\n"
        f"pool = CheckPool(num_workers=1, deadline_s={PATIENCE_S})\n"
        "print(asyncio.run(pool.check('operator:add', 1, 1)))\n"
        "pool.close()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "2\n", done.stdout + done.stderr


def test_a_worker_with_slow_imports_takes_a_broken_check_s_place_by_a_fork(pool):
    async def main():
        template = await pool.check("slow_to_load:parent_pid")
        spent = await pool.check("slow_to_load:compute_for_ever")
        values = [await pool.check("slow_to_load:add", 2, 3), await pool.check("operator:add", 1, 1)]
        return template, spent, values, await pool.check("slow_to_load:parent_pid")

    template, spent, values, later = asyncio.run(main())
    assert isinstance(spent, ComparisonTooLarge) and values == [5, 2]
    assert later == template  # nothing was imported again


def test_workers_do_not_import_torch(pool):
    asyncio.run(pool.check("slime.rollout.rm_hub.math_utils:extract_answer", "\\boxed{1}"))
    code = "'torch' in __import__('sys').modules"
    assert asyncio.run(pool.check("builtins:eval", code)) is False


def test_argument_that_cannot_be_pickled_raises_and_the_pool_stays_usable(pool):
    with pytest.raises(Exception, match="pickle"):
        asyncio.run(pool.check("builtins:id", lambda: 0))
    assert asyncio.run(pool.check("operator:add", 1, 1)) == 2


def test_close_ends_workers_busy_or_idle():
    pool = CheckPool(num_workers=2, deadline_s=PATIENCE_S)

    async def main():
        pids = set()
        while len(pids) < 2:
            pids |= set(await asyncio.gather(pool.check("os:getpid"), pool.check("os:getpid")))
        hanging = asyncio.create_task(pool.check("time:sleep", 1000))
        await asyncio.sleep(0.2)
        pool.close()
        return pids, await hanging

    pids, failure = asyncio.run(main())
    assert failure.kind == "infra_error"
    eventually(lambda: not any(map(is_running, pids)))
    with pytest.raises(RuntimeError, match="closed"):
        asyncio.run(pool.check("os:getpid"))


def test_workers_die_with_a_killed_parent_even_inside_a_c_call():
    script = """
import asyncio
from slime.rollout.rm_hub.workers.check_pool import CheckPool
pool = CheckPool(1, 60.0)
async def main():
    print(await pool.check("os:getpid"), flush=True)
    await pool.check("re:match", "(a+)+$", "a" * 60 + "b")
asyncio.run(main())
"""
    parent = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        pid = int(parent.stdout.readline())
        time.sleep(0.3)
        assert is_running(pid)
    finally:
        parent.kill()
        parent.wait()
    eventually(lambda: not is_running(pid))


@pytest.mark.parametrize("size, deadline", [(0, 1.0), (1, 0.0)])
def test_useless_sizes_are_refused_by_flag_name(size, deadline):
    with pytest.raises(ValueError, match=r"--limits reward-workers|--timeouts reward"):
        CheckPool(size, deadline)
