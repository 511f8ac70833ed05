"""Packed micro-batches and packed attention against one document at a time."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from trainer_helpers import random_samples, trainer_args

from slime.backends.attention import flash4, long_documents, prefix_operator
from slime.backends.attention.context_parallel import chunk_multiple, zigzag_positions, zigzag_tree
from slime.backends.attention.documents import PackedDocuments
from slime.backends.attention.long_documents import plan_parts
from slime.backends.attention.packed_documents import (
    packed_attention,
    prepare,
    transformers_attention,
)
from slime.backends.experts import experts_operator
from slime.backends.fsdp import layer_execution
from slime.backends.shared.microbatch import build_micro_batch, split_by_sample
from slime.batch.convert import samples_to_batch


@pytest.mark.parametrize(
    "operator",
    [long_documents.attend, prefix_operator.attend, flash4.attend, experts_operator._forward],
)
def test_selective_recomputation_keeps_our_own_operators_by_their_names(operator):
    assert operator._name in layer_execution._KEPT_OPERATORS


def one_document(query, key, value, scale):
    repeat = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    scores = torch.einsum("ihd,jhd->hij", query, key) * scale
    mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    return torch.einsum("hij,jhd->ihd", F.softmax(scores.masked_fill(~mask, float("-inf")), -1), value)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 90), min_size=1, max_size=12))
def test_packed_attention_is_causal_attention_within_each_document(lengths):
    torch.manual_seed(0)
    total = sum(lengths)
    query = torch.randn(total, 4, 8, dtype=torch.float64, requires_grad=True)
    key, value = (torch.randn(total, 2, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    got = packed_attention(query, key, value, PackedDocuments.from_lengths(lengths), scale=0.3)
    parts = zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True)
    expected = torch.cat([one_document(q, k, v, 0.3) for q, k, v in parts])
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)
    direction = torch.randn_like(got)
    grads = [
        torch.autograd.grad((x * direction).sum(), (query, key, value), retain_graph=True)
        for x in (got, expected)
    ]
    torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("size", [2, 4])
def test_context_parallelism_pads_long_tail_lengths_by_less_than_one_percent(size):
    lengths = (
        torch.exp(6.5 + torch.randn(256, generator=torch.Generator().manual_seed(0))).clamp(16, 8192).long()
    )
    multiple = chunk_multiple(size)
    padding = (-lengths % multiple).sum() / lengths.sum()
    assert 0 < padding < 0.01


@pytest.mark.parametrize("size", [2, 3])
def test_chunks_of_context_parallelism_see_the_prefix_of_their_document(size):
    """The list of queries and prefixes gives each token exactly the keys that the whole documents give it."""
    lengths = tuple(2 * size * n for n in (1, 3, 2))
    documents = PackedDocuments.from_lengths(lengths)
    whole = {}
    for start, length in zip(documents.cu_seqlens.tolist(), lengths, strict=False):
        whole |= {start + i: list(range(start, start + i + 1)) for i in range(length)}
    held = [zigzag_positions(lengths, size, rank) for rank in range(size)]
    gathered, found = torch.cat(held), {}
    for rank in range(size):
        tree = zigzag_tree(lengths, size, rank)
        cu_query, cu_key = tree.cu_query.tolist(), tree.whole.cu_seqlens.tolist()
        for chunk in range(len(cu_query) - 1):
            queries = held[rank][cu_query[chunk] : cu_query[chunk + 1]].tolist()
            keys = gathered[tree.keys[cu_key[chunk] : cu_key[chunk + 1]]].tolist()
            for i, query in enumerate(queries):
                found[query] = keys[: len(keys) - len(queries) + i + 1]
    assert found == whole


def test_compiled_layers_can_be_prepared_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    prepare(2, 64)


def test_what_packed_attention_cannot_do_is_refused_by_name():
    x = torch.zeros(1, 1, 2, 4)
    documents = PackedDocuments.from_lengths([2])
    with pytest.raises(ValueError, match="Identity uses an attention mask"):
        transformers_attention(torch.nn.Identity(), x, x, x, None, documents=documents, position_bias=x)
    with pytest.raises(ValueError, match="dropout"):
        transformers_attention(torch.nn.Identity(), x, x, x, None, documents=documents, dropout=0.1)


def test_micro_batch_positions_point_at_the_logits_of_each_response_token():
    batch = {
        "tokens": [torch.tensor([5, 6, 7]), torch.tensor([8, 9])],
        "response_lengths": [2, 1],
        "loss_masks": [torch.tensor([1, 0]), torch.tensor([1])],
        "rollout_mask_sums": [1.0, 1.0],
        "advantages": [torch.tensor([0.1, 0.2]), torch.tensor([0.3])],
    }
    mb = build_micro_batch(batch, [0, 1], {"advantages": batch["advantages"]})
    assert mb.input_ids.tolist() == [[5, 6, 7, 8, 9]]
    assert mb.position_ids.tolist() == [[0, 1, 2, 0, 1]]
    assert mb.logit_positions.tolist() == [0, 1, 3]
    assert mb.targets.tolist() == [6, 7, 9]
    assert mb.segments.tolist() == [0, 0, 1]
    assert mb.tokens["advantages"].tolist() == pytest.approx([0.1, 0.2, 0.3])


def test_targets_are_the_response_tokens_for_any_selection():
    batch = samples_to_batch(trainer_args("unused"), random_samples(2, 3))
    mb = build_micro_batch(batch, [4, 1, 3])
    for position, targets in zip([4, 1, 3], split_by_sample(mb.targets, mb), strict=True):
        assert torch.equal(targets, batch["tokens"][position][-batch["response_lengths"][position] :])


def test_an_empty_micro_batch_runs_but_weighs_nothing():
    mb = build_micro_batch({}, [], {"advantages": []})
    assert mb.input_ids.numel() == 2
    assert mb.loss_mask.sum() == 0
    assert mb.positions == ()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 1500), min_size=1, max_size=12))
def test_parts_of_long_attention_cover_the_stream_once_and_in_order(lengths):
    bounds = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    long = 512
    parts = list(plan_parts(bounds, long))
    assert [parts[0].start, *(part.end for part in parts)] == [part.start for part in parts] + [bounds[-1]]
    assert [parts[0].first, *(part.last for part in parts)] == [part.first for part in parts] + [len(lengths)]
    for part in parts:
        inside = lengths[part.first : part.last]
        assert sum(inside) == part.end - part.start
        if part.rounded:
            assert len(inside) == 1 and inside[0] >= long
            assert inside[0] <= part.rounded < inside[0] + 128 and part.rounded % 128 == 0
        else:
            assert max(inside) < long
