import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from tranship.train.packing import Share, pack, padded, rows_by_prompt, split_by_tokens, split_evenly, spread

CPU = torch.device("cpu")


@st.composite
def batches(draw):
    """(prompts, group_of, responses, wanted) with distinct tokens, groups in any order, some empty."""
    num_prompts = draw(st.integers(1, 4))
    group_of = np.array(draw(st.lists(st.integers(0, num_prompts - 1), min_size=1, max_size=8)))
    counter = iter(range(10_000))
    prompts = [np.array([next(counter) for _ in range(draw(st.integers(1, 5)))]) for _ in range(num_prompts)]
    responses = [
        np.array([next(counter) for _ in range(draw(st.integers(0, 6)))], dtype=np.int32) for _ in range(len(group_of))
    ]
    wanted = [np.array(draw(st.lists(st.booleans(), min_size=len(r), max_size=len(r))), dtype=bool) for r in responses]
    return prompts, group_of, responses, wanted


@given(batches(), st.integers(1, 40))
def test_microbatches_hold_each_row_once_and_keep_to_the_limit(batch, max_tokens):
    prompts, group_of, responses, _ = batch
    shares = rows_by_prompt(len(prompts), group_of)
    runs = split_by_tokens(shares, [len(p) for p in prompts], [len(r) for r in responses], max_tokens)
    seen = [(share.prompt, row) for run in runs for share in run for row in share.rows]
    assert seen == sorted((int(group), row) for row, group in enumerate(group_of))
    for run in runs:
        size = sum(
            len(prompts[share.prompt]) + sum(max(0, len(responses[row]) - 1) for row in share.rows) for share in run
        )
        assert size <= max_tokens or sum(len(share.rows) for share in run) == 1
        assert len({share.prompt for share in run}) == len(run)


@given(batches(), st.integers(1, 40))
def test_whole_shares_are_never_split_and_a_larger_one_goes_alone(batch, max_tokens):
    prompts, group_of, responses, _ = batch
    shares = rows_by_prompt(len(prompts), group_of)
    runs = split_by_tokens(shares, [len(p) for p in prompts], [len(r) for r in responses], max_tokens, whole=True)
    assert [share for run in runs for share in run] == shares

    def size(share):
        return len(prompts[share.prompt]) + sum(max(0, len(responses[row]) - 1) for row in share.rows)

    for run, later in zip(runs, [*runs[1:], []], strict=True):
        assert sum(map(size, run)) <= max_tokens or len(run) == 1
        assert not later or sum(map(size, run)) + size(later[0]) > max_tokens


@given(st.integers(0, 20), st.integers(1, 8))
def test_an_even_split_keeps_order_and_loses_nothing(count, parts):
    shares = [Share(i, (i,)) for i in range(count)]
    runs = split_evenly(shares, parts)
    assert [share for run in runs for share in run] == shares
    assert len(runs) == min(count, parts)
    sizes = [len(run) for run in runs]
    assert not sizes or max(sizes) - min(sizes) <= 1


@given(batches())
def test_a_token_sees_its_own_past_and_nothing_else(batch):
    prompts, group_of, responses, wanted = batch
    packed = pack(rows_by_prompt(len(prompts), group_of), prompts, responses, wanted=wanted, device=CPU)
    tokens = packed.token_ids[0]
    index = packed.attention
    expected = {}
    for row, response in enumerate(responses):
        prompt = prompts[group_of[row]]
        expected |= {token: [*prompt[: i + 1]] for i, token in enumerate(prompt)}
        expected |= {token: [*prompt, *response[: i + 1]] for i, token in enumerate(response[:-1])}
    seen = []
    for block in index.blocks:
        bias = block.bias[:, 0].expand(len(block.queries), -1, -1)
        for row, keys in enumerate(tokens[block.keys]):
            seen += [keys[bias[row, step] == 0].tolist() for step in range(block.queries.shape[1])]
    assert len(seen) == index.num_places
    for token, place in zip(tokens.tolist(), index.inverse.tolist(), strict=True):
        assert seen[place] == expected[token]


@given(batches())
def test_each_wanted_token_is_predicted_from_the_token_before_it(batch):
    prompts, group_of, responses, wanted = batch
    packed = pack(rows_by_prompt(len(prompts), group_of), prompts, responses, wanted=wanted, device=CPU)
    flat = torch.full((len(packed.rows) * packed.max_response,), -1)
    flat[packed.slot] = packed.target
    before = torch.full_like(flat, -1)
    before[packed.slot] = packed.token_ids[0][packed.source]
    position = torch.full_like(flat, -1)
    position[packed.slot] = packed.position_ids[0][packed.source]
    for sample, row in enumerate(packed.rows):
        prompt, response = prompts[group_of[row]], responses[row]
        for step in range(packed.max_response):
            slot = sample * packed.max_response + step
            if step < len(response) and wanted[row][step]:
                assert flat[slot] == response[step]
                assert before[slot] == (response[step - 1] if step else prompt[-1])
                assert position[slot] == len(prompt) + step - 1
            else:
                assert flat[slot] == -1


@given(batches())
def test_padded_columns_and_spread_values_lie_at_their_rows(batch):
    prompts, group_of, responses, wanted = batch
    packed = pack(rows_by_prompt(len(prompts), group_of), prompts, responses, wanted=wanted, device=CPU)
    columns = padded(packed, responses, np.int64)
    values = spread(packed, packed.target.double())
    assert columns.shape == values.shape == (len(responses), max(map(len, responses)))
    for place, row in enumerate(packed.rows):
        length = len(responses[row])
        assert columns[place, :length].tolist() == responses[row].tolist()
        assert values[place, :length].tolist() == np.where(wanted[row], responses[row], 0).tolist()
        assert not columns[place, length:].any()
        assert not values[place, length:].any()
