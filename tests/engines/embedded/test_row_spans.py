"""Rows that gather keys together see what each would see alone."""

import numpy as np
import pytest
import torch

from slime.engines.embedded import row_spans

PAGE = 4


def family(prompts: int, samples: int, shared: int, own: int) -> tuple[np.ndarray, np.ndarray]:
    """Pages and lengths of rows whose prompts have `shared` pages each, and samples `own` of their own."""
    numbers = iter(np.random.default_rng(0).permutation(1000) + 1)
    pages = []
    for _ in range(prompts):
        prompt = [next(numbers) for _ in range(shared)]
        pages += [prompt + [next(numbers) for _ in range(own)] for _ in range(samples)]
    lengths = [(shared + own) * PAGE - row % (own * PAGE) for row in range(len(pages))]
    order = np.random.default_rng(1).permutation(len(pages))
    return np.array(pages)[order], np.array(lengths)[order]


@pytest.mark.parametrize("scaling", [None, 0.3])
@pytest.mark.parametrize("prompts,samples", [(1, 3), (3, 7), (6, 8)])
def test_attention_of_spans_is_that_of_each_row(prompts, samples, scaling):
    pages, lengths = family(prompts, samples, shared=6, own=2)
    group = row_spans.lay_out(2, pages, lengths, PAGE)
    torch.manual_seed(0)
    query = torch.randn(2 + len(pages) + 1, 6, 16)  # other tokens of the pass stand around them
    keys, values = torch.randn(1001 * PAGE, 2, 16), torch.randn(1001 * PAGE, 2, 8)
    found = group.attend(query, keys, values, scaling)
    for row, (own, length) in enumerate(zip(pages, lengths, strict=True)):
        places = (own[:, None] * PAGE + np.arange(PAGE)).flatten()[:length]
        key, value = (pool[places].repeat_interleave(3, 1).transpose(0, 1) for pool in (keys, values))
        expected = torch.nn.functional.scaled_dot_product_attention(
            query[2 + row, :, None], key, value, scale=scaling
        )
        torch.testing.assert_close(found[row], expected[:, 0])


def test_rows_that_share_nothing_are_left_to_others():
    assert row_spans.lay_out(0, *family(30, 1, shared=10, own=2), PAGE) is None


def test_so_many_keys_are_left_to_others():
    assert row_spans.lay_out(0, *family(1, 100, shared=200, own=1), PAGE) is None


def test_the_pages_that_a_sequence_got_do_not_change_a_bit():
    """An engine that was started again hands other pages out; a resumed run draws from the same numbers."""
    torch.manual_seed(0)
    length, contents = np.arange(1, 20), torch.randn(20, 2, 8)
    query, values = torch.randn(len(length), 4, 8), torch.randn(20, 2, 8)

    def attend(pages: list[int]) -> torch.Tensor:
        pool_rows = np.concatenate([np.arange(4) + 4 * page for page in pages])[:20]
        keys, kept = torch.zeros(64, 2, 8), torch.zeros(64, 2, 8)
        keys[pool_rows], kept[pool_rows] = contents, values
        group = row_spans.lay_out(0, np.tile(pages, (len(length), 1)), length, 4)
        assert group is not None
        return group.attend(query, keys, kept, None)

    assert torch.equal(attend([1, 2, 3, 4, 5]), attend([14, 15, 1, 9, 2]))
