"""Samples that share prefixes, on ranks that share the tokens: the same steps as plain ones on one rank."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from prefix_groups import ALIKE, GROUPS, LONG_PROMPTS, families_of_samples
from tiny_model import make_tiny_model
from trainer_helpers import init_process_group, meeting_point, trainer_args, with_nuclei

from slime.backends.attention.packed_documents import packed_attention
from slime.backends.attention.shared_prefixes import PrefixShare
from slime.backends.attention.spread_prefixes import SpreadShare
from slime.backends.fsdp import create_backend
from slime.backends.fsdp.model import gather_full
from slime.backends.shared.microbatch import build_micro_batch
from slime.batch.convert import samples_to_batch
from slime.batch.split import split_for_ranks
from slime.step.training_step import TrainingStep

BATCHES = {"groups": GROUPS, "long prompts": LONG_PROMPTS, "alike": ALIKE}
CONTEXT, TENSOR = "context_parallel_size", "tensor_model_parallel_size"
LAYOUTS = {
    "context": (2, {CONTEXT: 2}),
    "tensor": (2, {TENSOR: 2}),
    "context x tensor": (4, {CONTEXT: 2, TENSOR: 2}),
    "four context": (4, {CONTEXT: 4}),
    "data x context": (4, {CONTEXT: 2}),
}


def share_of(groups, *, nuclei=False):
    samples = families_of_samples(groups)
    samples = with_nuclei(samples) if nuclei else samples
    mb = build_micro_batch(samples_to_batch(trainer_args("unused"), samples), range(len(samples)))
    return PrefixShare.of(mb)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("groups", BATCHES.values(), ids=BATCHES)
def test_ranks_hold_every_token_once_and_attend_as_one_would(groups, size):
    share = share_of(groups)
    tree, tokens = share.documents, share.input_ids.shape[1]
    parts = [SpreadShare.of(share, size, rank, None) for rank in range(size)]
    assert len({part.input_ids.shape for part in parts}) == 1, "ranks gather as many rows each"
    assert parts[0].input_ids.shape[1] <= -(-tokens // size) + 1
    torch.manual_seed(0)
    heads = [torch.randn(tokens, n, 8, dtype=torch.float64) for n in (4, 2, 2)]
    expected = packed_attention(*(x[tree.keys] for x in heads), tree.whole)[tree.own]
    # What the ranks hold of each stream token, one rank behind the other, as a gather gives it.
    labels = torch.arange(1, tokens + 1)
    labelled = [
        SpreadShare.of(_with_ids(share, labels), size, rank, None).input_ids[0] for rank in range(size)
    ]
    rows = torch.cat(labelled)
    assert sorted(rows[rows > 0].tolist()) == labels.tolist()
    gathered = [x[(rows - 1).clamp(min=0)] for x in heads]
    seen = set()
    for part, own in zip(parts, labelled, strict=True):
        real = own > 0
        assert torch.equal(part.copies > 0, real)
        queries = heads[0][(own - 1).clamp(min=0)]
        found = part.documents.tree.attend(queries, *gathered[1:], None)
        torch.testing.assert_close(found[real], expected[own[real] - 1])
        assert torch.equal(own[part.rows] - 1, share.rows[part.predicted])
        assert torch.equal(part.places, share.places[part.predicted])
        seen.update(part.predicted.tolist())
    assert seen == set(range(len(share.rows)))


def _with_ids(share, labels):
    return replace(share, input_ids=labels[None])


def take_step(backend, args, samples):
    layout = backend.layout
    shares = split_for_ranks(args, samples_to_batch(args, samples), layout.dp_size, cp_size=layout.cp_size)
    return TrainingStep(backend, args, 0, shares[layout.dp_rank], weight_version=1).run().summary


def results_of(model, rank, world_size, **changes):
    """By batch, with and without nuclei: a step's report, the weights behind it, how many streams shared."""
    made, build = [], PrefixShare.of
    PrefixShare.of = lambda *a, **k: made.append(build(*a, **k)) or made[-1]
    found = {}
    for name, groups in BATCHES.items():
        for nuclei in (False, True):
            args = trainer_args(
                model, optimizer="sgd", lr=0.2, entropy_coef=0.01, use_kl_loss=True, kl_loss_coef=0.1,
                use_dynamic_batch_size=True, max_tokens_per_gpu=200, logprob_diff_threshold=0.0, **changes,
            )  # fmt: skip
            samples = families_of_samples(groups)
            backend = create_backend(args, rank=rank, world_size=world_size, device="cpu")
            report = take_step(backend, args, with_nuclei(samples) if nuclei else samples)
            weights = {n: gather_full(p.data).clone() for n, p in backend.model.lm.named_parameters()}
            found[name, nuclei] = report, weights, sum(share is not None for share in made)
            made.clear()
    PrefixShare.of = build
    return found


def work(rank, layout, address, folder):
    torch.set_num_threads(1)
    world_size, changes = LAYOUTS[layout]
    init_process_group(rank, world_size, address)
    found = {
        model: results_of(folder / model, rank, world_size, share_prefix=None, **changes)
        for model in ("dense", "mixture", "window")
        if not (model == "mixture" and TENSOR in changes)
    }
    if rank == 0:
        torch.save(found, folder / f"{layout}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    import transformers

    folder = tmp_path_factory.mktemp("spread")
    shape = dict(vocab_size=128, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, head_dim=8)
    configs = {
        "mixture": transformers.Qwen3MoeConfig(
            **shape, num_key_value_heads=2, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2
        ),
        "window": transformers.MistralConfig(
            **shape, num_key_value_heads=2, intermediate_size=64, sliding_window=5
        ),
    }
    torch.manual_seed(0)
    for name, config in configs.items():
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)
    make_tiny_model(folder / "dense", layers=2, hidden=32)
    init_process_group(0, 1, meeting_point())
    found = {name: results_of(folder / name, 0, 1, share_prefix=False) for name in ("dense", *configs)}
    dist.destroy_process_group()
    return folder, found


slow = pytest.mark.slow


@pytest.mark.parametrize(
    "layout", ["context", *(pytest.param(name, marks=slow) for name in list(LAYOUTS)[1:])]
)
def test_a_step_with_shared_prefixes_on_several_ranks_equals_a_plain_one(world, layout):
    folder, plain = world
    mp.spawn(work, args=(layout, meeting_point(), folder), nprocs=LAYOUTS[layout][0])
    for model, batches in torch.load(folder / f"{layout}.pt").items():
        for batch, (report, weights, num_shared) in batches.items():
            expected, expected_weights, none_shared = plain[model][batch]
            assert num_shared > 0 == none_shared
            for key in ("train/loss", "train/grad_norm", "train/entropy_loss", "train/kl_loss"):
                assert report[key] == pytest.approx(expected[key], rel=1e-5, abs=1e-6), (model, batch, key)
            for key, value in weights.items():
                torch.testing.assert_close(value, expected_weights[key], rtol=1e-4, atol=1e-5)


def test_ranks_that_share_tokens_get_samples_of_one_prompt_together(world):
    folder, _ = world
    args = trainer_args(folder / "dense", use_dynamic_batch_size=True, max_tokens_per_gpu=55)
    batch = samples_to_batch(args, families_of_samples([(20, [5, 6, 7, 8])] * 4))
    (rank,) = split_for_ranks(args, batch, 1, cp_size=2)
    prompts = [
        {bytes(rank.batch["tokens"][p][:20].numpy()) for p in positions}
        for positions in rank.steps[0].micro_batches
    ]
    assert all(len(found) == 1 for found in prompts)
    assert sorted(rank.steps[0].positions) == list(range(16))
