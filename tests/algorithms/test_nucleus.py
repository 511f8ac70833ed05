"""Log-probs and entropy over recorded ids against a softmax over exactly
these ids in float64, values and gradients.
"""

import itertools

import pytest
import torch

from slime.algorithms.logprobs import chunked_log_probs
from slime.algorithms.nucleus import Nucleus

VOCAB, WIDTH = 17, 5


def ragged(rows, generator, *, open_rows=()):
    """Random ids per row, each row's target among them; the rows in `open_rows` have none."""
    targets = torch.randint(0, VOCAB, (rows,), generator=generator)
    kept = []
    for row in range(rows):
        more = torch.randperm(VOCAB, generator=generator)[
            : int(torch.randint(0, VOCAB, (1,), generator=generator))
        ]
        kept.append([] if row in open_rows else sorted({*more.tolist(), int(targets[row])}))
    return targets, kept


def nucleus_of(kept):
    bounds = torch.tensor([0, *(len(ids) for ids in kept)]).cumsum(0)
    return Nucleus.of([torch.tensor([i for ids in kept for i in ids], dtype=torch.int32)], [bounds])


def brute_force(hidden, weight, targets, kept, temperature):
    """One token after the other: a softmax over its own ids, nothing else."""
    log_probs, entropies = [], []
    for row, ids in enumerate(kept):
        ids = ids or list(range(len(weight)))
        dist = torch.log_softmax((weight[ids] @ hidden[row]) / temperature, dim=0)
        log_probs.append(dist[ids.index(int(targets[row]))])
        entropies.append(-(dist.exp() * dist).sum())
    return torch.stack(log_probs), torch.stack(entropies)


def inputs(rows=11, **options):
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(rows, WIDTH, dtype=torch.float64, generator=generator, requires_grad=True)
    weight = torch.randn(VOCAB, WIDTH, dtype=torch.float64, generator=generator, requires_grad=True)
    return hidden, weight, *ragged(rows, generator, **options)


@pytest.mark.parametrize("chunk_size", [-1, 1, 4, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("use", [(1.0, 0.0), (0.0, 1.0), (1.0, 0.3)], ids=["log_probs", "entropy", "both"])
@pytest.mark.parametrize("memory_gib", [0.0, 1.0])
def test_values_and_gradients_match_a_softmax_over_the_recorded_ids(chunk_size, temperature, use, memory_gib):
    hidden, weight, targets, kept = inputs(open_rows=(2, 10))
    coefficients = torch.randn(2, len(targets), dtype=torch.float64) * torch.tensor(use)[:, None]

    def grads(pair):
        terms = [c @ x for c, x in zip(coefficients, pair, strict=True) if c.any()]
        return torch.autograd.grad(sum(terms), (hidden, weight))

    expected = brute_force(hidden, weight, targets, kept, temperature)
    options = dict(
        temperature=temperature, chunk_size=chunk_size, memory_gib=memory_gib, nucleus=nucleus_of(kept)
    )
    got = chunked_log_probs(hidden, weight, targets, with_entropy=True, **options)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(grads(got), grads(expected), rtol=1e-10, atol=1e-10)


def test_a_token_that_had_no_rival_is_certain_and_teaches_nothing():
    hidden, weight, targets, _ = inputs(rows=3)
    got, entropy = chunked_log_probs(
        hidden, weight, targets, with_entropy=True, nucleus=nucleus_of([[int(t)] for t in targets])
    )
    assert got.tolist() == [0.0] * 3 and entropy.abs().max() == 0.0
    assert not torch.cat(
        [g.flatten() for g in torch.autograd.grad((got + entropy).sum(), (hidden, weight))]
    ).any()


def test_ids_of_everything_change_nothing():
    hidden, weight, targets, _ = inputs()
    everything = nucleus_of([list(range(VOCAB))] * len(targets))
    plain = chunked_log_probs(hidden, weight, targets, with_entropy=True)
    torch.testing.assert_close(
        chunked_log_probs(hidden, weight, targets, with_entropy=True, nucleus=everything),
        plain,
        rtol=0,
        atol=0,
    )


def test_a_sampled_token_outside_of_its_ids_counts_as_one_of_them():
    hidden, weight, targets, _ = inputs(rows=1)
    other = (int(targets[0]) + 1) % VOCAB
    got, _ = chunked_log_probs(hidden, weight, targets, nucleus=nucleus_of([[other]]))
    expected, _ = brute_force(hidden, weight, targets, [[int(targets[0]), other]], 1.0)
    torch.testing.assert_close(got, expected)


def test_bf16_and_large_logits_stay_finite():
    hidden, weight, targets, kept = inputs()
    hidden, weight = (x.detach().to(torch.bfloat16).mul(300).requires_grad_() for x in (hidden, weight))
    got, entropy = chunked_log_probs(
        hidden, weight, targets, temperature=0.05, with_entropy=True, nucleus=nucleus_of(kept)
    )
    (got.sum() + entropy.sum()).backward()
    assert all(x.isfinite().all() for x in (got, entropy, hidden.grad, weight.grad))


def test_rows_and_selections_are_those_of_the_whole():
    _, _, _, kept = inputs(open_rows=(0, 4, 5))
    whole = nucleus_of(kept)

    def lists(nucleus):
        ids, bounds = nucleus.ids.tolist(), nucleus.offsets.tolist()
        assert nucleus.row_of.tolist() == [
            r for r in range(len(bounds) - 1) for _ in range(bounds[r], bounds[r + 1])
        ]
        return [ids[a:b] for a, b in itertools.pairwise(bounds)]

    assert lists(whole) == kept
    assert lists(whole.rows(3, 8)) == kept[3:8]
    assert lists(whole.rows(4, 4)) == []
    places = [7, 0, 3, 3, 10]
    assert lists(whole.select(torch.tensor(places))) == [kept[p] for p in places]
    assert lists(whole.select(torch.tensor([], dtype=torch.int64))) == []
    joined = Nucleus.of(
        [part.ids for part in (whole.rows(0, 4), whole.rows(4, 11))],
        [part.offsets.int() for part in (whole.rows(0, 4), whole.rows(4, 11))],
    )
    assert lists(joined) == kept
