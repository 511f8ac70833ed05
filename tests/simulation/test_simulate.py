"""The real loop on a virtual clock: it is exact, it ends, and what is wrong with it is found."""

import asyncio
import json
from pathlib import Path

import pytest

from slime.arguments import Args, parse_args
from slime.cli.main import main
from slime.cli.simulate import split_flags
from slime.rollout import fully_async_rollout
from slime.rollout.collection.collector import Collector
from slime.rollout.ledger import Ledger
from slime.simulation.clock import Clock, Stalled
from slime.simulation.costs import Costs, EngineCost, TrainerCost
from slime.simulation.fuzz import fuzz, make_case, run_case
from slime.simulation.modelled_engines import ModelledEngine
from slime.simulation.simulated_run import Measured, Simulation
from slime.simulation.simulated_settings import simulated_args
from slime.simulation.splits import find_splits
from slime.simulation.workload import Fault, FaultPlan, LengthModel, RewardModel, Workload

FULLY_ASYNC = "slime.rollout.fully_async_rollout.generate_rollout_fully_async"


@pytest.fixture
def args(tmp_path: Path) -> Args:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"input": "a"}\n')
    words = f"--hf-checkpoint none --prompt-data {prompts} --rm-type math --rollout-batch-size 4 "
    words += "--n-samples-per-prompt 2 --num-rollout 5 --rollout-max-response-len 40"
    return parse_args(words.split())


def simulate(args: Args, *, overlapped: bool = False, keeps: bool = False, **about) -> Measured:
    """Answers of 20 tokens at 0.1 s a token whatever else runs, training of 3 s, a push of 0.5 s."""
    costs = Costs(1, EngineCost(0.1, 0.0, 0.0, 0.0, 64), TrainerCost(1, 3.0, 0.0, push_s=0.5))
    workload = Workload(about.pop("lengths", LengthModel("fixed", (20.0,), 40.0)), 4.0, **about)
    small = simulated_args(args, steps=5, unit=1, keeps=keeps)
    simulation = Simulation(small, costs, workload, overlapped=overlapped, keeps=keeps)
    simulation.run()
    return simulation.shares()


def test_time_jumps_to_what_comes_next_and_a_hang_is_an_error():
    clock = Clock()
    with clock.running():
        clock.run(asyncio.sleep(3600.0))
        assert clock.now == pytest.approx(3600.0)
        with pytest.raises(Stalled, match="hang"):
            clock.run(asyncio.Event().wait())


def test_a_synchronous_step_is_the_sum_of_its_parts(args):
    measured = simulate(args)
    assert measured.step_s == pytest.approx(20 * 0.1 + 3.0 + 0.5, rel=1e-3)
    assert measured.engine_busy == pytest.approx(2.0 / 5.5, rel=0.1)
    assert measured.staleness == {0: 1.0}
    assert measured.wasted == pytest.approx(0.0, abs=1e-6)


def test_an_overlapped_step_is_the_longer_of_the_two_and_one_version_behind(args):
    measured = simulate(args, overlapped=True)
    assert measured.step_s == pytest.approx(3.0 + 0.5, rel=1e-3)
    assert set(measured.staleness) == {0, 1}  # the first batch is made and trained by the first weights


def test_slow_rewards_cost_the_pool_less_than_the_synchronous_loop(args):
    rewards = RewardModel(mean_s=10.0, sigma=1.0)
    waits = simulate(args, rewards=rewards)
    pool = simulate(
        args.replace(rollout_function_path=FULLY_ASYNC, max_weight_staleness=3),
        overlapped=True,
        rewards=rewards,
    )
    assert pool.step_s < 0.6 * waits.step_s
    assert max(pool.staleness) <= 3


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("bound", [1, 2])
def test_in_both_loops_no_trained_token_is_older_than_the_bound(args, overlapped, bound):
    """The real loops; ages are those that the trainer sees. Slow rewards keep groups in flight for long."""
    pool = args.replace(rollout_function_path=FULLY_ASYNC, max_weight_staleness=bound)
    rewards = RewardModel(mean_s=6.0, sigma=1.2)
    measured = simulate(pool, overlapped=overlapped, rewards=rewards)
    assert len(measured.step_ends) == 5
    assert max(measured.staleness) == bound  # it is used, and not exceeded


def test_a_request_slows_down_with_those_beside_it():
    clock = Clock()
    with clock.running():
        lengths = LengthModel("fixed", (10.0,), 100.0)
        engine = ModelledEngine(clock, EngineCost(0.0, 1.0, 0.0, 0.0, 2), lengths, "one", 1, {})

        def ask(number: int):
            return engine.generate(
                {"input_ids": [1], "rid": f"{number}-x", "sampling_params": {"max_new_tokens": 50}}
            )

        async def three() -> list[float]:
            async def one(number: int) -> float:
                await ask(number)
                return clock.now

            return list(await asyncio.gather(*(one(i) for i in range(3))))

        # Two at once take 2 s a token; the third waits for a place and is alone.
        assert clock.run(three()) == pytest.approx([20.0, 20.0, 30.0])
        assert engine.tokens == pytest.approx(30.0)


def test_faults_of_every_kind_are_survived_and_nothing_is_lost(args):
    faults = FaultPlan(
        tuple(Fault(at, kind) for at, kind in ((1.0, "engine"), (7.0, "driver"), (13.0, "trainer"))),
        engine_restart_s=2.0,
        run_restart_s=5.0,
    )
    measured = simulate(args.replace(save_interval=2), keeps=True, faults=faults)
    assert measured.num_starts == 2  # a lost trainer is replaced while the run goes on
    assert measured.audit is not None and measured.audit.violations == []
    assert measured.audit.steps == [0, 1, 2, 3, 4]


def test_a_seed_is_the_same_run_each_time(args):
    seeds = range(20, 24)
    first = [run_case(make_case(args, seed)) for seed in seeds]
    again = [run_case(make_case(args, seed)) for seed in seeds]
    for (_, one), (_, other) in zip(first, again, strict=True):
        assert one.audit is not None and other.audit is not None
        assert (one.wall_s, one.step_ends, one.audit.digest) == (
            other.wall_s,
            other.step_ends,
            other.audit.digest,
        )


def test_orders_of_faults_conserve_every_sample(args):
    found = fuzz(args, 12, first_seed=100)
    assert found.failures == {}
    assert found.kinds["driver"] and found.kinds["trainer"] and found.kinds["engine"]
    assert found.starts > 12


def test_a_group_that_is_forgotten_is_found_with_the_seed_that_shows_it(args, monkeypatch):
    def loses_a_group(self, ticket, group, cause, hint=""):
        del self._tickets[ticket.number]  # and never gives it back

    monkeypatch.setattr(Collector, "_requeue", loses_a_group)
    seed = next(seed for seed in range(100, 200) if run_case(make_case(args, seed))[0])
    found = fuzz(args, 1, first_seed=seed)  # as `--fuzz 1 --seed` does
    assert "lost" in found.failures[seed]


def test_a_resume_that_forgets_what_was_made_is_found(args, monkeypatch):
    monkeypatch.setattr(Ledger, "resumed", lambda self, committed, last_made: None)
    assert any(run_case(make_case(args, seed))[0] for seed in range(100, 200))


def test_lengths_are_as_they_are_asked_for_and_a_mistake_is_named():
    model = LengthModel.parse("lognormal:900:0.5", 1e9, seed=3)
    assert model.mean == pytest.approx(900, rel=0.05)
    assert model.answer(7) == model.answer(7)
    with pytest.raises(ValueError, match="--lengths 'normal:3'"):
        LengthModel.parse("normal:3", 10, 0)


def test_the_command_prints_the_splits_and_the_best_of_them(capsys):
    words = "simulate --hf-checkpoint Qwen/Qwen3-4B --rm-type math --rollout-batch-size 4 --gpus 4 --steps 3 "
    words += "--n-samples-per-prompt 2 --rollout-max-response-len 1024 --loop fully-async"
    assert main(words.split()) == 0
    printed = capsys.readouterr().out
    assert (
        "best: " in printed
        and "engines trainer" in printed
        and "tokens without a learning signal: " in printed
    )
    assert printed.count("%  ") > 3
    assert max(map(len, printed.splitlines())) <= 80


@pytest.mark.parametrize(
    ("model", "gpus", "some"),
    [
        ("qwen3-30b-a3b", 16, "--actor-num-nodes 2 --actor-num-gpus-per-node 7"),
        ("deepseek-v3", 512, "--rollout-num-gpus-per-engine 16"),
    ],
)
def test_every_split_has_a_place_and_slime_plan_agrees(args, tmp_path, capsys, model, gpus, some):
    options, _ = split_flags(["--model", model, "--gpus", str(gpus)])
    lengths, about = LengthModel("fixed", (1000.0,), 1000.0), ["", ""]
    many = args.replace(rollout_batch_size=64, n_samples_per_prompt=8)
    found = find_splits(many, options, lengths, about)
    assert any(some in split.flags for split in found)
    prompts = tmp_path / "prompts.jsonl"
    words = f"--hf-checkpoint none --prompt-data {prompts} --rm-type math --rollout-batch-size 64 --json "
    prompts.write_text('{"input": "a"}\n')
    words += "--n-samples-per-prompt 8 --num-rollout 1 --rollout-max-response-len 9 "
    words += "--rollout-engine sglang --sglang-python /bin/true"
    for split in found:
        hosts = -(-gpus // 8)
        main(["plan", *words.split(), "--place", f"{hosts}x8", *split.flags.split()])
        rows = json.loads(capsys.readouterr().out)["hosts"]
        assert sum(len(row["ranks"]) for row in rows) == split.train
        engines = [name for row in rows for name in row["engines"]]
        assert len(set(engines)) == split.costs.num_engines
        assert len(engines) == len(set(engines)) * -(-split.costs.engine.gpus // 8)


def test_the_numbers_of_a_run_that_cannot_be_placed_are_an_error(capsys):
    words = "simulate --model qwen3-4b --rm-type math --rollout-batch-size 4 --n-samples-per-prompt 2 "
    words += (
        "--rollout-max-response-len 64 --actor-num-nodes 2 --actor-num-gpus-per-node 7 --rollout-num-gpus 2 "
    )
    with pytest.raises(SystemExit):
        main([*words.split(), "--num-gpus-per-node", "8", "--rollout-num-gpus-per-engine", "2"])
    message = "can be used (14 + 2 GPUs: no place for engines of 2 on machines of 8)"
    assert message in capsys.readouterr().err


def test_the_name_of_a_model_is_enough_of_one(capsys):
    words = "simulate --model qwen3-4b --rm-type math --rollout-batch-size 4 --n-samples-per-prompt 2 "
    assert main([*words.split(), "--rollout-max-response-len", "64", "--steps", "1"]) == 0
    assert "4.0B parameters" in capsys.readouterr().out


def test_a_model_that_nobody_knows_is_an_error_with_the_names(capsys):
    words = "simulate --hf-checkpoint no/such --rm-type math --rollout-batch-size 4 --n-samples-per-prompt 2 "
    with pytest.raises(SystemExit):
        main([*words.split(), "--rollout-max-response-len", "64"])
    assert "qwen3-4b" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        "--gpus 0",
        "--gpus 1",
        "--gpus 100000000",
        "--steps 0",
        "--steps x",
        "--fuzz -1",
        "--prompt-tokens -4",
        "--lengths lognormal:nan:1",
        "--lengths fixed:inf",
        "--lengths uniform:10:5",
        "--reward-s -1",
        "--reward-s 1:x",
        "--reward-failures 2",
    ],
)
def test_a_number_that_makes_no_sense_is_refused_by_the_name_of_its_flag(words, capsys, tmp_path):
    file = tmp_path / "run.yaml"  # how long to train is said by --steps
    file.write_text(
        "hf_checkpoint: qwen3-4b\nrm_type: math\nrollout_batch_size: 4\nn_samples_per_prompt: 2\n"
    )
    with pytest.raises(SystemExit) as stop:
        main(["simulate", str(file), "--rollout-max-response-len", "64", *words.split()])
    assert stop.value.code == 2
    assert words.split()[0] in capsys.readouterr().err.splitlines()[-1]


def test_the_pool_of_a_killed_run_is_not_that_of_the_next(args):
    faults = FaultPlan((Fault(4.0, "driver"),), run_restart_s=1.0)
    pool = args.replace(rollout_function_path=FULLY_ASYNC, save_interval=1)
    measured = simulate(pool, overlapped=True, keeps=True, faults=faults)
    assert measured.audit is not None and measured.audit.violations == []
    assert fully_async_rollout._workers == {}
