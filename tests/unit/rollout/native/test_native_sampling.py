"""Seeds to uniforms, logits to tokens."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tranship.rollout.native.sampling import RowSampling, draw, uniforms


def rows(count, *, seed=None, position=0, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    return RowSampling(
        seed=np.arange(count, dtype=np.uint64) if seed is None else np.full(count, seed, np.uint64),
        position=np.full(count, position, np.int64),
        temperature=np.full(count, temperature),
        top_k=np.full(count, top_k, np.int64),
        top_p=np.full(count, top_p),
        min_p=np.full(count, min_p),
    )


def test_uniforms_are_uniform_and_independent_of_their_neighbours():
    seeds = np.arange(200, dtype=np.uint64)
    table = np.stack([uniforms(seeds, np.full(200, position)) for position in range(200)])
    assert ((table >= 0) & (table < 1)).all()
    counts, _ = np.histogram(table, bins=20, range=(0, 1))
    assert np.abs(counts - 2000).max() < 5 * np.sqrt(2000)
    for a, b in ((table[1:], table[:-1]), (table[:, 1:], table[:, :-1])):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.02
    assert len(np.unique(table)) == table.size
    assert uniforms(seeds[17:18], np.array([5]))[0] == table[5, 17]


def test_uniforms_use_all_bits_of_a_seed():
    seeds = np.array([3, 3 + (1 << 62), 3 + (1 << 33)], np.uint64)
    assert len(set(uniforms(seeds, np.zeros(3)).tolist())) == 3


@pytest.mark.parametrize("vocab", [2, 255, 256, 257, 1000])
def test_frequencies_are_the_probabilities(vocab):
    torch.manual_seed(vocab)
    logits = torch.randn(vocab) * 2
    count = 40000
    tokens, logprobs = draw(logits.expand(count, -1), rows(count))
    wanted = torch.softmax(logits.double(), -1).numpy()
    seen = np.bincount(tokens, minlength=vocab)
    busy = wanted * count > 20
    error = (seen - wanted * count)[busy] / np.sqrt((wanted * (1 - wanted) * count)[busy])
    assert np.abs(error).max() < 5
    assert abs((error**2).mean() - 1) < 5 * np.sqrt(2 / busy.sum())
    assert np.abs(logprobs - np.log(wanted)[tokens]).max() < 1e-5


def kept_tokens(logits, top_k, top_p, min_p):
    """The candidates after the cuts, one by one."""
    probs = torch.softmax(logits.double(), -1).tolist()
    order = sorted(range(len(probs)), key=lambda token: -probs[token])
    if top_k:
        order = order[:top_k]
    total, mass, kept = sum(probs[token] for token in order), 0.0, []
    for token in order:
        if mass < top_p * total and probs[token] >= min_p * probs[order[0]]:
            kept.append(token)
        mass += probs[token]
    return kept, probs


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [(1, 1.0, 0.0), (7, 1.0, 0.0), (0, 0.6, 0.0), (0, 1.0, 0.1), (20, 0.8, 0.05), (0, 0.999, 0.0), (1000, 1.0, 0.0)],
)
def test_cuts_leave_what_a_plain_loop_leaves(top_k, top_p, min_p):
    torch.manual_seed(1)
    logits = torch.randn(300) * 2
    kept, probs = kept_tokens(logits, top_k, top_p, min_p)
    count = 30000
    tokens, logprobs = draw(logits.expand(count, -1), rows(count, top_k=top_k, top_p=top_p, min_p=min_p))
    assert set(tokens.tolist()) <= set(kept)
    wanted = np.array([probs[token] for token in kept]) / sum(probs[token] for token in kept)
    seen = np.array([(tokens == token).sum() for token in kept])
    busy = wanted * count > 20
    assert (np.abs(seen - wanted * count)[busy] < 5 * np.sqrt(wanted * count)[busy]).all()
    assert np.abs(logprobs - np.log([probs[token] for token in tokens])).max() < 1e-5


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 40),
    st.sampled_from([3, 256, 300, 513]),
    st.floats(0.01, 300),
    st.integers(0, 2**63 - 1),
    st.sampled_from([0.0, 0.3, 1.0]),
    st.sampled_from([(0, 1.0, 0.0), (5, 1.0, 0.0), (0, 0.5, 0.0), (0, 1.0, 0.3)]),
)
def test_a_drawn_token_is_possible_and_rows_do_not_see_each_other(count, vocab, spread, seed, temperature, cut):
    generator = torch.Generator().manual_seed(seed % 1000)
    logits = torch.randn(count, vocab, generator=generator) * spread
    logits[:, ::2] = float("-inf")
    logits[:, 1] = 0
    how = rows(count, temperature=temperature, top_k=cut[0], top_p=cut[1], min_p=cut[2])
    tokens, logprobs = draw(logits, how)
    assert (tokens % 2 == 1).all()
    assert np.isfinite(logprobs).all()
    one = count // 2
    alone = draw(logits[one : one + 1], how.rows(slice(one, one + 1)))
    assert (alone[0][0], alone[1][0]) == (tokens[one], logprobs[one])


def test_rows_of_different_kinds_in_one_batch():
    torch.manual_seed(0)
    logits = torch.randn(4, 1000) * 3
    kinds = [{"temperature": 0.0}, {"temperature": 0.5}, {"top_k": 3}, {}]
    parts = [rows(1, seed=index, **kind) for index, kind in enumerate(kinds)]
    names = ("seed", "position", "temperature", "top_k", "top_p", "min_p")
    mixed = RowSampling(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))
    tokens, logprobs = draw(logits, mixed)
    for index, part in enumerate(parts):
        alone = draw(logits[index : index + 1], part)
        assert (tokens[index], logprobs[index]) == (alone[0][0], alone[1][0])
    assert tokens[0] == logits[0].argmax()


def test_the_edges_of_the_uniform_draw_the_ends(monkeypatch):
    logits = torch.full((1, 600), float("-inf"))
    logits[0, [5, 300, 555]] = 0.0
    for value, wanted in ((0.0, 5), (1 - 2.0**-53, 555), (0.5, 300)):
        monkeypatch.setattr("tranship.rollout.native.sampling.uniforms", lambda *_, v=value: np.array([v]))
        assert draw(logits, rows(1))[0][0] == wanted
        assert draw(logits, rows(1, top_p=0.9999999))[0][0] in (5, 300, 555)


def test_a_row_that_is_not_finite_reports_nan_and_leaves_the_others():
    logits = torch.randn(3, 300)
    clean = draw(logits, rows(3))
    logits[1, 7] = float("nan")
    tokens, logprobs = draw(logits, rows(3))
    assert np.isnan(logprobs).tolist() == [False, True, False]
    assert tokens[[0, 2]].tolist() == clean[0][[0, 2]].tolist()
    for how in (rows(3, temperature=0.0), rows(3, top_p=0.5)):
        assert np.isnan(draw(logits, how)[1]).tolist() == [False, True, False]
