"""SGLang's kernels of speculation in PyTorch: attention as a plain one, drafts verified without a bias."""

import pytest
import torch

from slime.engines.sglang import cpu_speculation as kernels

HEADS, SIZE, SLOTS = 4, 8, 64


def cache():
    """(keys, values, table of slots: row r of a request holds the slots of its tokens, in no order)."""
    torch.manual_seed(0)
    keys, values = torch.randn(SLOTS, 2, SIZE), torch.randn(SLOTS, 2, SIZE)
    return keys, values, torch.randperm(SLOTS).view(4, 16).int()


def plain(query, keys, values):
    """One token that sees all of `keys`."""
    keys, values = (x.repeat_interleave(2, dim=1) for x in (keys, values))
    weights = (torch.einsum("hd,shd->hs", query, keys) * 0.3).softmax(1)
    return torch.einsum("hs,shd->hd", weights, values)


def test_attention_of_new_tokens_is_a_plain_one_over_the_cache():
    keys, values, table = cache()
    rows, lengths, new = torch.tensor([2, 0]), torch.tensor([7, 3]), torch.tensor([3, 2])
    query = torch.randn(5, HEADS, SIZE)
    out = torch.empty_like(query)
    kernels.extend_attention(
        query,
        None,
        None,
        out,
        keys,
        values,
        1.0,
        1.0,
        table,
        rows,
        lengths,
        new,
        torch.tensor([0, 3]),
        3,
        0.3,
    )
    seen = [(2, 5), (2, 6), (2, 7), (0, 2), (0, 3)]
    for place, (row, length) in enumerate(seen):
        slots = table[row, :length].long()
        torch.testing.assert_close(out[place], plain(query[place], keys[slots], values[slots]))


def test_a_decoded_token_is_written_and_sees_itself():
    keys, values, table = cache()
    rows, lengths = torch.tensor([1, 3]), torch.tensor([4, 9])
    query, key, value = torch.randn(2, HEADS, SIZE), torch.randn(2, 2, SIZE), torch.randn(2, 2, SIZE)
    slots = table[rows, lengths - 1].long()
    out = torch.empty_like(query)
    kernels.decode_attention(
        query, keys, values, 1.0, 1.0, out, key, value, slots, None, table, rows, lengths, 0.3
    )
    assert torch.equal(keys[slots], key) and torch.equal(values[slots], value)
    for place, (row, length) in enumerate([(1, 4), (3, 9)]):
        own = table[row, :length].long()
        torch.testing.assert_close(out[place], plain(query[place], keys[own], values[own]))


def outputs(requests, width):
    return dict(
        predicts=torch.zeros(requests * width, dtype=torch.int32),
        accept_index=torch.full((requests, width), -1, dtype=torch.int32),
        accept_token_num=torch.empty(requests, dtype=torch.int32),
    )


def test_greedy_drafts_are_accepted_up_to_the_first_other_token():
    found = outputs(3, 3)
    candidates = torch.tensor([[9, 1, 2], [9, 1, 5], [9, 5, 2]])
    kernels.accept_greedy(**found, candidates=candidates, target_predict=torch.tensor([[1, 2, 3]] * 3))
    assert found["accept_token_num"].tolist() == [2, 1, 0]
    assert found["accept_index"].tolist() == [[0, 1, 2], [3, 4, -1], [6, -1, -1]]
    assert found["predicts"].tolist() == [1, 2, 3, 1, 2, 0, 1, 0, 0]


def test_sampled_tokens_have_the_distribution_of_the_target_whatever_is_drafted():
    torch.manual_seed(0)
    requests, probs = 40_000, torch.tensor([[0.6, 0.3, 0.1], [0.1, 0.2, 0.7], [0.25, 0.25, 0.5]])
    found = outputs(requests, 3)
    kernels.accept_sampled(
        **found,
        candidates=torch.tensor([[2, 1, 2]]).expand(requests, 3),
        uniform_samples=torch.rand(requests, 3),
        uniform_samples_for_final_sampling=torch.rand(requests),
        target_probs=probs.expand(requests, 3, 3),
        threshold_single=1.0,
        threshold_acc=1.0,
    )
    tokens, count = found["predicts"].view(requests, 3), found["accept_token_num"]
    for place in range(3):  # those that got so far
        drawn = tokens[count >= place, place]
        share = torch.bincount(drawn, minlength=3) / len(drawn)
        error = (probs[place] * (1 - probs[place]) / len(drawn)).sqrt()
        assert ((share - probs[place]).abs() < 4 * error).all(), (place, share)
    assert float((count >= 1).float().mean()) == pytest.approx(0.3, abs=0.01)


def test_slots_go_into_the_table_and_come_back():
    table = torch.zeros(3, 8, dtype=torch.int32)
    rows, starts, ends = torch.tensor([2, 0]), torch.tensor([1, 4]), torch.tensor([3, 7])
    kernels.assign_slots(rows, table, starts, ends, torch.arange(10, 15), 8)
    assert table.tolist() == [[0, 0, 0, 0, 12, 13, 14, 0], [0] * 8, [0, 10, 11, 0, 0, 0, 0, 0]]
    out = torch.empty(5, dtype=torch.int64)
    kernels.slots_between(rows, table, starts, ends, out, 8)
    assert out.tolist() == [10, 11, 12, 13, 14]
    out = torch.empty(4, dtype=torch.int64)
    kernels.draft_slots(rows, table, starts, out, 8, 1, 2)
    assert out.tolist() == [10, 11, 12, 13]
    memory = torch.arange(8.0).view(4, 2)
    kernels.move_slots(
        torch.tensor([memory.data_ptr()]), torch.tensor([8]), torch.tensor([1, 0]), torch.tensor([0, 3])
    )
    assert memory.tolist() == [[6, 7], [0, 1], [4, 5], [6, 7]]


def test_a_chain_of_drafts_is_laid_out_and_a_tree_is_refused():
    links = [torch.empty(2, 3, dtype=torch.int64) for _ in range(3)]
    mask, positions = torch.ones(18, dtype=torch.bool), torch.empty(6, dtype=torch.int64)
    lengths = torch.tensor([5, 9])
    kernels.build_chain(None, None, lengths, mask, positions, *links, 1, 2, 3, 1)
    assert positions.tolist() == [5, 6, 7, 9, 10, 11]
    assert [x.tolist()[1] for x in links] == [[3, 4, 5], [1, 2, -1], [-1, -1, -1]]
    assert torch.equal(mask.view(2, 3, 3)[1], torch.ones(3, 3).tril().bool())
    with pytest.raises(NotImplementedError, match="topk 1"):
        kernels.build_chain(None, None, lengths, mask, positions, *links, 4, 2, 3, 1)


def test_trees_of_drafts_are_refused_before_the_server_starts():
    from slime.engines.sglang.run_server import refuse_trees

    refuse_trees(["--speculative-algorithm", "EAGLE", "--speculative-eagle-topk", "1"])
    with pytest.raises(SystemExit, match="--sglang-speculative-eagle-topk is 4: drafts on a CPU"):
        refuse_trees(["--speculative-algorithm", "EAGLE", "--speculative-eagle-topk", "4"])
