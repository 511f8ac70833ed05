"""Every algorithm gives the numbers of the FSDP trainer: loss, gradient norm, weights after SGD.

The reference is the FSDP trainer on one process; PPO, reward models, DPO, SFT, distillation from a teacher of
the same and of another size, and frozen parameters, each on one process, under tensor, sequence, pipeline and
context parallelism.
"""

import numpy as np
import pytest
import torch

pytest.importorskip("megatron.core")

from megatron_helpers import end_groups, exported, in_processes, make_family, megatron_args, training_step
from trainer_helpers import random_samples

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(1800)]

BASE = dict(
    lr=0.1,
    optimizer="sgd",
    global_batch_size=5,
    use_dynamic_batch_size=True,
    max_tokens_per_gpu=40,
    weight_decay=0.0,
)
PPO = dict(
    advantage_estimator="ppo",
    gamma=0.9,
    lambd=0.8,
    value_clip=0.05,
    critic_lr=0.05,
    use_kl_loss=True,
    kl_loss_coef=0.1,
)
OPD = dict(use_opd=True, opd_type="trainer", opd_kl_coef=0.5)
FROZEN = ["embed_tokens", r"layers\.[01]\.", "norm"]
ALGORITHMS = {
    "ppo": PPO,
    "reward model": dict(loss_type="rm_loss"),
    "dpo": dict(loss_type="dpo_loss"),
    "sft": dict(loss_type="sft_loss"),
    "warm sft": dict(loss_type="sft_loss", rollout_temperature=0.7),
    "raw logits": dict(
        loss_type="custom_loss",
        custom_loss_function_path=f"{__file__}:nll_of_raw_logits",
        rollout_temperature=0.7,
    ),
    "opd sampled": dict(OPD, teacher="teacher"),
    "opd full": dict(OPD, opd_kl="full", teacher="teacher", rollout_temperature=0.8),
    "opd full large teacher": dict(OPD, opd_kl="full", teacher="large", log_probs_chunk_size=7),
    "opd top k": dict(use_opd=True, opd_type="engine", opd_kl="forward_top_k", opd_kl_coef=0.5),
    "frozen": dict(freeze_params_name_list=FROZEN),
    "only head": dict(only_train_params_name_list=["lm_head"]),
    "tied frozen embedding": dict(freeze_params_name_list=["embed_tokens"], model="tied"),
}
LAYOUTS = {
    "tp2": dict(tp=2),
    "tp2 sp": dict(tp=2, sp=True),
    "pp2": dict(pp=2),
    "cp2": dict(cp=2),
}
# Where a head function sees whole samples: refused when arguments are parsed.
NOT_WITH_CP = ("opd full", "opd top k", "opd full large teacher", "raw logits")
CASES = [
    (name, layout)
    for layout in LAYOUTS
    for name in ALGORITHMS
    if not (layout == "cp2" and name in NOT_WITH_CP)
]


def nll_of_raw_logits(args, batch, logits, reduce):
    """SFT as a loss of one's own; the temperature is its own business, as in slime."""
    dist = torch.log_softmax(logits[0] / args.rollout_temperature, -1)
    rows, start = [], 0
    for tokens, length in zip(batch["unconcat_tokens"], batch["response_lengths"], strict=True):
        end = start + len(tokens)
        rows.append(dist[torch.arange(end - length - 1, end - 1), tokens[-length:]])
        start = end
    value = -reduce(torch.cat(rows))
    return value, {"largest_logit": logits.abs().max().detach()}


def samples_for(settings):
    samples = random_samples(5, 3, vocab=127)
    if settings.get("opd_type") == "engine":
        for sample in samples:
            rows = range(sample.response_length)
            sample.teacher_log_probs = [-4.0] * sample.response_length
            sample.teacher_top_ids = np.array(
                [[(37 * r + 50 * k) % 127 for k in range(3)] for r in rows], np.int32
            )
            sample.teacher_top_log_probs = np.array([[-0.9, -1.7, -2.6] for _ in rows], np.float32)
    if settings.get("loss_type") not in ("dpo_loss", "rm_loss"):
        return samples
    samples = random_samples(10, 2, vocab=127)
    for sample in samples:
        sample.rollout_id = sample.group_index
        sample.reward = 1.0 - sample.index % 2
        sample.rollout_log_probs = None
    return samples


def train_case(rank, world_size, models, settings, create):
    settings = dict(settings)
    model = models[settings.pop("model", "qwen3")]
    if teacher := settings.pop("teacher", None):
        settings["opd_teacher_load"] = models[teacher]
    args = megatron_args(model, **(BASE | settings))
    end_groups()
    backend = create(args, rank=rank, world_size=world_size, device="cpu")
    before = exported(backend)
    report = training_step(backend, args, samples_for(settings)).run()
    skipped = ("time", "tok_per_s", "tflops")
    result = {
        "steps": [{n: v for n, v in step.items() if not n.endswith(skipped)} for step in report.steps],
        "metrics": {n: v for n, v in report.summary.items() if not n.endswith(skipped)},
        "before": before,
        "after": exported(backend),
    }
    if backend.critic is not None:
        result["critic"] = exported(backend.critic)
    return result


def run_all(rank, world_size, models, cases):
    from slime.backends import fsdp, megatron

    results = {}
    for name, (settings, kind) in cases.items():
        create = {"fsdp": fsdp, "megatron": megatron}[kind].create_backend
        results[name] = train_case(rank, world_size, models, settings, create)
    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("algorithms")


@pytest.fixture(scope="module")
def models(folder):
    return {
        "qwen3": make_family(folder / "qwen3", "qwen3"),
        "tied": make_family(folder / "tied", "qwen3", tie_word_embeddings=True),
        "teacher": make_family(folder / "teacher", "qwen3", seed=3),
        "large": make_family(folder / "large", "qwen3", seed=4, hidden_size=48, num_hidden_layers=6),
    }


@pytest.fixture(scope="module")
def one(folder, models):
    cases = {f"fsdp {name}": (settings, "fsdp") for name, settings in ALGORITHMS.items()}
    cases |= {name: (settings, "megatron") for name, settings in ALGORITHMS.items()}
    return in_processes(1, run_all, folder, models, cases)


@pytest.fixture(scope="module")
def two(folder, models):
    cases = {(name, layout): ({**ALGORITHMS[name], **LAYOUTS[layout]}, "megatron") for name, layout in CASES}
    return in_processes(2, run_all, folder, models, cases)


def hub_names(weights):
    """The FSDP trainer holds a scalar head in the output matrix's place."""
    return {
        ("score.weight" if t.shape[0] == 1 and n == "lm_head.weight" else n): t for n, t in weights.items()
    }


def check(found, reference):
    assert len(found["steps"]) == len(reference["steps"]) >= 2
    for step, expected in zip(found["steps"], reference["steps"], strict=True):
        assert step.keys() == expected.keys()
        for name, value in expected.items():
            assert step[name] == pytest.approx(value, rel=1e-4, abs=2e-5), name
    for name, value in reference["metrics"].items():
        assert found["metrics"][name] == pytest.approx(value, rel=1e-4, abs=2e-5), name
    for kind in ("before", "after", "critic"):
        assert (kind in found) == (kind in reference)
        if kind not in reference:
            continue
        weights = hub_names(reference[kind])
        assert found[kind].keys() == weights.keys()
        for name, tensor in weights.items():
            torch.testing.assert_close(
                found[kind][name], tensor, rtol=0, atol=2e-6, msg=lambda m, n=name, k=kind: f"{k} {n}: {m}"
            )


def moved(result):
    return {
        name for name, tensor in result["after"].items() if not torch.equal(tensor, result["before"][name])
    }


@pytest.mark.parametrize("name", ALGORITHMS)
def test_one_process_equals_fsdp(one, name):
    check(one[name], one[f"fsdp {name}"])
    assert moved(one[name]), "the steps must change the weights for this comparison to mean something"


@pytest.mark.parametrize(("name", "layout"), CASES, ids=lambda value: value.replace(" ", "-"))
def test_two_ranks_equal_fsdp(one, two, name, layout):
    check(two[name, layout], one[f"fsdp {name}"])


def test_a_custom_loss_divides_raw_logits_by_the_temperature_itself(one):
    """At temperature 1 raw and divided logits are the same, so SFT is compared at another."""
    for prefix in ("", "fsdp "):
        found, expected = one[f"{prefix}raw logits"]["metrics"], one[f"{prefix}warm sft"]["metrics"]
        assert found["train/loss"] == pytest.approx(expected["train/loss"], rel=1e-5)
        assert found["train/grad_norm"] == pytest.approx(expected["train/grad_norm"], rel=1e-4)


def test_frozen_parameters_stay(one):
    assert not any("embed_tokens" in n or ".layers.0." in n or "norm" in n for n in moved(one["frozen"]))
    assert "model.layers.3.mlp.up_proj.weight" in moved(one["frozen"])
    assert moved(one["only head"]) == {"lm_head.weight"}


def refusals(rank, world_size, models):
    from slime.backends.megatron import create_backend

    found = {}
    for name, settings in {
        "no match": dict(freeze_params_name_list=["nothing"]),
        "half": dict(freeze_params_name_list=["k_proj"]),
        "all": dict(freeze_params_name_list=["."]),
    }.items():
        try:
            create_backend(
                megatron_args(models["qwen3"], **(BASE | settings)), rank=rank, world_size=1, device="cpu"
            )
        except ValueError as error:
            found[name] = str(error)
    return found


def test_patterns_and_critics_that_do_not_fit_are_refused(folder, models):
    found = in_processes(1, refusals, folder, models)
    assert "'nothing' matches no parameter; names look like model.layers" in found["no match"]
    assert "matches model.layers.0.self_attn.k_proj.weight but not" in found["half"]
    assert "freezes every parameter" in found["all"]


def step_without_tokens(rank, world_size, models):
    """How far weights move under Adam in a step, in one without trained tokens, and in another."""
    from slime.backends.megatron import create_backend

    warm = dict(lr=1e-2, weight_decay=0.5, lr_decay_style="linear", lr_decay_iters=8, global_batch_size=None)
    found = {}
    for name, settings in {
        "plain": dict(advantage_estimator="ppo", critic_lr=1e-2),
        "distributed": dict(distopt=True, overlap_grad_reduce=True, overlap_param_gather=True),
    }.items():
        args = megatron_args(models["qwen3"], **settings, **warm)
        backend = create_backend(args, rank=rank, world_size=world_size, device="cpu")
        moved, metrics = [], []
        for seed in range(3):
            samples = random_samples(2, 4, vocab=127, seed=seed)
            for sample in samples:
                sample.loss_mask = [0] * sample.response_length if seed == 1 else sample.loss_mask
            models_of = [backend, *([backend.critic] if backend.critic is not None else [])]
            before = [exported(one) for one in models_of]
            metrics.append(training_step(backend, args, samples, seed).run().summary)
            after = [exported(one) for one in models_of]
            pairs = [(a[n], b[n]) for a, b in zip(before, after, strict=True) for n in a]
            moved.append(max((x - y).abs().max().item() for x, y in pairs))
        found[name] = (
            moved,
            [m.get("train/empty_steps") for m in metrics],
            [m["train/lr-pg_0"] for m in metrics],
        )
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_step_in_which_no_token_trains_changes_nothing(folder, models, world_size):
    for moved, empty, rates in in_processes(world_size, step_without_tokens, folder, models).values():
        assert moved[0] > 0 and moved[1] == 0 and moved[2] > 0
        assert empty == [None, 1.0, None]
        assert rates[0] > rates[1] == rates[2]  # the schedule counts steps that were taken
