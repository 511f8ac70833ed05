"""Samples that share what they begin with train as if each had its own: outputs, gradients, whole steps."""

import itertools
import json
import random

import pytest
import torch
import torch.distributed as dist
from prefix_groups import ALIKE, GROUPS, LONG_PROMPTS, families_of_samples
from trainer_helpers import meeting_point, trainer_args

from slime.backends.attention.attention_operator import NotInstalled
from slime.backends.attention.packed_documents import packed_attention
from slime.backends.attention.prefix_operator import collect, readers_of
from slime.backends.attention.prefix_passes import Passes, why_not
from slime.backends.attention.shared_prefixes import PrefixShare
from slime.backends.fsdp import create_backend
from slime.backends.shared.microbatch import build_micro_batch
from slime.batch.convert import samples_to_batch
from slime.batch.split import split_for_ranks
from slime.step.training_step import TrainingStep


def drawn(seed):
    """Groups at random: prompts that begin as whole samples do, answers that come again or have no token."""
    rng, groups, seen = random.Random(seed), [], []
    for _ in range(rng.randint(2, 5)):
        prompt = list(rng.choice(seen))[: rng.randint(1, 60)] if seen and rng.random() < 0.7 else []
        prompt = [*prompt, *rng.choices(range(4, 128), k=rng.randint(1, 40))]
        answers = [rng.choices(range(4, 7), k=rng.choice((0, 1, 2, 9))) for _ in range(rng.randint(1, 6))]
        seen += [prompt + answer for answer in answers]
        groups.append((prompt, answers))
    return groups


@pytest.fixture(scope="module", autouse=True)
def process_group():
    dist.init_process_group("gloo", init_method=meeting_point(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def micro_batch(groups):
    samples = families_of_samples(groups)
    args = trainer_args("unused")
    return build_micro_batch(samples_to_batch(args, samples), range(len(samples)))


def prefixes_of(mb):
    """For each token of the documents the whole of what it ends."""
    bounds, ids = mb.documents.bounds.tolist(), mb.input_ids[0].tolist()
    return [tuple(ids[a : end + 1]) for a, b in itertools.pairwise(bounds) for end in range(a, b)]


@pytest.mark.parametrize("all_tokens", [False, True])
@pytest.mark.parametrize("groups", [GROUPS, ALIKE, *map(drawn, range(8))])
def test_the_stream_holds_each_prefix_once_and_predicts_the_same_tokens(groups, all_tokens):
    mb = micro_batch(groups)
    share, prefixes = PrefixShare.of(mb, all_tokens=all_tokens), prefixes_of(mb)
    tree, stream = share.documents, share.input_ids[0]
    last = set() if all_tokens else {end - 1 for end in mb.documents.bounds.tolist()}
    expected = {prefix for place, prefix in enumerate(prefixes) if place not in last}
    cu_key, cu_query = tree.whole.cu_seqlens.tolist(), tree.cu_query.tolist()
    found = []
    for part in range(len(cu_query) - 1):
        keys = tree.keys[cu_key[part] : cu_key[part + 1]]
        own = cu_query[part + 1] - cu_query[part]
        assert keys[-own:].tolist() == list(range(cu_query[part], cu_query[part + 1]))
        assert tree.own[keys[-own:]].tolist() == list(range(cu_key[part + 1] - own, cu_key[part + 1]))
        seen = stream[keys].tolist()
        found += [tuple(seen[: end + 1]) for end in range(len(seen) - own, len(seen))]
    assert len(found) == len(set(found)) == len(expected) and set(found) == expected
    assert share.position_ids[0].tolist() == [len(prefix) - 1 for prefix in found]
    assert share.copies.tolist() == [prefixes.count(prefix) for prefix in found]
    predicted = [prefixes[place + 1] for place in mb.logit_positions.tolist()]
    assert len(share.rows) == len(set(predicted)), "each once"
    told = [(*found[row], int(mb.targets[at])) for row, at in zip(share.rows, share.places, strict=True)]
    assert [told[which] for which in share.which] == predicted


LONGEST_PROMPT = [(1027, [3, 5]), (9, [1, 1])]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("groups", [GROUPS, LONG_PROMPTS, LONGEST_PROMPT, ALIKE, *map(drawn, range(4))])
def test_attention_and_its_gradients_equal_those_of_whole_documents(dtype, groups):
    tree = PrefixShare.of(micro_batch(groups)).documents
    torch.manual_seed(0)
    heads = [torch.randn(len(tree.own), n, 8, dtype=dtype, requires_grad=True) for n in (4, 2, 2)]
    whole = packed_attention(*(x[tree.keys] for x in heads), tree.whole)[tree.own]
    shared = tree.attend(*heads, None)
    direction = torch.randn_like(whole)
    torch.testing.assert_close(shared, whole)
    expected = torch.autograd.grad((whole * direction).sum(), heads)
    found = torch.autograd.grad((shared * direction).sum(), heads)
    for ours, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, exact)


def test_gradients_of_copies_are_added_up_over_readers_and_heads():
    tree = PrefixShare.of(micro_batch(GROUPS)).documents
    torch.manual_seed(0)
    wide = torch.randn(len(tree.keys), 6, 8)
    expected = torch.zeros(len(tree.own), 2, 8).index_add_(0, tree.keys, wide.view(-1, 2, 3, 8).sum(2))
    torch.testing.assert_close(collect(wide, *readers_of(tree.keys, len(tree.own)), 2), expected)


def _plain_passes(wrong: float = 0.0) -> Passes:
    """Both passes by autograd over plain attention, on any device; `wrong`: added to a gradient."""

    def attended(query, key, value, bounds, scale):
        parts = []
        for q, k in zip(bounds.cu_query.unfold(0, 2, 1), bounds.cu_key.unfold(0, 2, 1), strict=True):
            a, b, c = query[slice(*q)], key[slice(*k)], value[slice(*k)]
            b, c = (x.repeat_interleave(a.shape[1] // x.shape[1], dim=1) for x in (b, c))
            mask = torch.ones(len(a), len(b)).tril(len(b) - len(a)).bool()
            scores = torch.einsum("qhd,khd->hqk", a, b).mul(scale).masked_fill(~mask, float("-inf"))
            parts.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), c))
        return torch.cat(parts)

    def backward(grad, query, key, value, _out, _sums, bounds, scale):
        inputs = [x.detach().requires_grad_() for x in (query, key, value)]
        first, *rest = torch.autograd.grad(attended(*inputs, bounds, scale), inputs, grad)
        return first + wrong, *rest

    return Passes(lambda *args: (attended(*args), torch.zeros(1)), backward)


def _absent(*_args):
    raise NotInstalled("flash-attn-4")


def test_kernels_of_a_package_are_tried_against_known_ones_first():
    shape = (4, 2, 8, torch.float32, torch.device("cpu"))
    assert why_not(_plain_passes(), _plain_passes(), *shape) is None
    assert "its gradient of the query is off by" in why_not(_plain_passes(wrong=1.0), _plain_passes(), *shape)
    assert why_not(Passes(_absent, _absent), _plain_passes(), *shape) == "", "no fault of it"
    broken = Passes(lambda *args: 1 / 0, _absent)
    assert "it failed on a small batch (ZeroDivisionError" in why_not(broken, _plain_passes(), *shape)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(8, 8), (8, 2)])
def test_on_a_gpu_attention_to_shared_prefixes_equals_that_of_whole_documents(heads):
    mb = micro_batch([(300, [40, 7, 130]), (64, [1, 1]), (9, [60])])
    tree = PrefixShare.of(mb).documents
    torch.manual_seed(0)
    exact = [torch.randn(len(tree.own), n, 64, requires_grad=True) for n in (heads[0], heads[1], heads[1])]
    ours = [x.detach().cuda().bfloat16().requires_grad_() for x in exact]
    whole = packed_attention(*(x[tree.keys] for x in exact), tree.whole)[tree.own]
    shared = tree.to(torch.device("cuda")).attend(*ours, None)
    direction = torch.randn_like(whole)
    expected = [whole, *torch.autograd.grad((whole * direction).sum(), exact)]
    found = [shared, *torch.autograd.grad((shared * direction.cuda()).sum(), ours)]
    for a, b in zip(found, expected, strict=True):
        assert (a.cpu().float() - b).norm() < 0.02 * b.norm()


@pytest.mark.parametrize("groups", [[(5, [3])], [(3, [90, 100]), (3, [80])], [(4, [5]), (6, [5])]])
def test_nothing_is_rearranged_where_little_would_be_saved(groups):
    assert PrefixShare.of(micro_batch(groups)) is None


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    import transformers
    from tiny_model import make_tiny_model

    root = tmp_path_factory.mktemp("models")
    mixture = transformers.Qwen3MoeConfig(
        vocab_size=128, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2, head_dim=8,
    )  # fmt: skip
    mixture.save_pretrained(root / "mixture")
    window = transformers.MistralConfig(
        vocab_size=128, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=64, sliding_window=5, head_dim=8,
    )  # fmt: skip
    window.save_pretrained(root / "window")
    make_tiny_model(root / "dense")
    return root


def step_of(folder, share, groups=GROUPS, **changes):
    args = trainer_args(folder, share_prefix=share, kl_loss_coef=0.0, **changes)
    backend = create_backend(args, rank=0, world_size=1, device=torch.device("cpu"), random_weights=True)
    data = split_for_ranks(args, samples_to_batch(args, families_of_samples(groups)), 1)[0]
    report = TrainingStep(backend, args, 0, data).run()
    return report.summary, {name: p.detach().clone() for name, p in backend.model.lm.named_parameters()}


@pytest.mark.parametrize(("name", "size"), [("dense", 32), ("dense", 3), ("mixture", 32), ("window", 32)])
@pytest.mark.parametrize("groups", [GROUPS, LONG_PROMPTS, ALIKE])
def test_a_step_with_shared_prefixes_equals_one_without(folders, name, size, groups, monkeypatch):
    plain, plain_weights = step_of(folders / name, False, groups, micro_batch_size=size)
    made, build = [], PrefixShare.of
    monkeypatch.setattr(PrefixShare, "of", lambda *a, **k: made.append(build(*a, **k)) or made[-1])
    shared, weights = step_of(folders / name, None, groups, micro_batch_size=size)
    assert any(share is not None for share in made)
    for key in ("train/loss", "train/grad_norm", "train/entropy_loss"):
        assert shared[key] == pytest.approx(plain[key], rel=1e-5, abs=1e-6)
    for key, value in weights.items():
        torch.testing.assert_close(value, plain_weights[key], rtol=1e-4, atol=2e-5)


def test_siblings_meet_in_a_micro_batch_and_ranks_get_like_shares():
    samples = families_of_samples([(20, [5, 6, 7, 8])] * 4)
    args = trainer_args("unused", use_dynamic_batch_size=True, max_tokens_per_gpu=110)
    batch = samples_to_batch(args, samples)
    (rank,) = split_for_ranks(args, batch, 1)
    prompts = [
        {bytes(rank.batch["tokens"][p][:20].numpy()) for p in positions}
        for positions in rank.steps[0].micro_batches
    ]
    assert all(len(found) == 1 for found in prompts)
    shares = split_for_ranks(args, batch, 2)
    assert [len(share.steps[0].positions) for share in shares] == [8, 8]
    apart = split_for_ranks(args.replace(share_prefix=False), batch, 1)[0]
    assert sorted(apart.steps[0].positions) == sorted(rank.steps[0].positions)


def test_a_shared_prompt_counts_once_where_sharing_is_asked_for():
    samples = families_of_samples([(20, [5, 6, 7, 8])] * 4)
    args = trainer_args("unused", use_dynamic_batch_size=True, max_tokens_per_gpu=110)
    batch = samples_to_batch(args, samples)
    counts = {
        share: len(split_for_ranks(args.replace(share_prefix=share), batch, 1)[0].steps[0].micro_batches)
        for share in (None, True)
    }
    assert counts == {None: 4, True: 2}  # a family has 106 tokens, 46 with its prompt once
    whole = [dict(advantage_estimator="ppo"), dict(loss_type="custom_loss")]
    for changes in whole:
        needs_all = args.replace(share_prefix=True, **changes)
        (rank,) = split_for_ranks(needs_all, batch, 1)
        assert len(rank.steps[0].micro_batches) == 4, "a pass that shares nothing must fit as well"


def test_a_model_that_cannot_share_is_refused_where_sharing_is_asked_for(folders, tmp_path):
    config = json.loads((folders / "dense" / "config.json").read_text()) | {"model_type": "bloom"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"--share-prefix: a bloom cannot .*every sample whole"):
        step_of(tmp_path, True, micro_batch_size=32)
    step_of(tmp_path, None, micro_batch_size=32)


@pytest.mark.slow
def test_layers_of_one_kind_are_compiled_once_for_all(folders, monkeypatch):
    from torch._dynamo.testing import CompileCounter

    from slime.backends.fsdp import layer_execution

    counter, compile_, after_layers = CompileCounter(), torch.compile, []

    def noting(function, **options):
        compiled = compile_(function, backend=counter, **options)

        def layer(*args, **kwargs):
            result = compiled(*args, **kwargs)
            after_layers.append(counter.frame_count)
            return result

        return layer

    monkeypatch.setattr(layer_execution.torch, "compile", noting)
    config = json.loads((folders / "dense" / "config.json").read_text())
    config.update(num_hidden_layers=5, layer_types=["full_attention"] * 5)
    (folders / "deep").mkdir()
    (folders / "deep" / "config.json").write_text(json.dumps(config))
    torch._dynamo.reset()
    step_of(folders / "deep", None, micro_batch_size=32, compile=True)
    torch._dynamo.reset()
    # The first layer is given what needs no gradient: the second may need code of its own.
    assert len(after_layers) == 5
    assert 0 < after_layers[1] == after_layers[-1]
