import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from tranship.algorithms.aggregate import aggregate

ROOT = Path(__file__).parents[3]
LOSSES = torch.tensor([[1.0, 1, 1, 1], [5, 0, 0, 0]])
MASK = torch.tensor([[True] * 4, [True, False, False, False]])
EXPECTED = {
    "token-mean": 1.8,
    "seq-mean-token-sum": 4.5,
    "seq-mean-token-mean": 3.0,
    "seq-mean-token-sum-norm": 1.125,
}
TOTALS = {"num_tokens": 5, "num_sequences": 2, "max_response_tokens": 4}


def share(losses, mask, mode, **totals):
    losses = losses.clone().requires_grad_()
    value = aggregate(losses, mask, mode, **{**TOTALS, **totals})
    value.backward()
    return value.item(), losses.grad


@pytest.mark.parametrize("mode", EXPECTED)
def test_value_of_each_mode(mode):
    assert share(LOSSES, MASK, mode)[0] == pytest.approx(EXPECTED[mode], abs=1e-6)


def test_token_mean_pulls_equally_on_every_token():
    torch.testing.assert_close(share(LOSSES, MASK, "token-mean")[1], 0.2 * MASK.float())


@pytest.mark.parametrize("mode", EXPECTED)
def test_split_into_microbatches_changes_nothing(mode):
    whole, gradient = share(LOSSES, MASK, mode)
    parts = [share(LOSSES[i : i + 1], MASK[i : i + 1], mode) for i in range(2)]
    assert sum(value for value, _ in parts) == pytest.approx(whole, abs=1e-6)
    torch.testing.assert_close(torch.cat([g for _, g in parts]), gradient)


@pytest.mark.parametrize("mode", EXPECTED)
def test_a_fully_masked_row_counts_nowhere(mode):
    losses = torch.cat([LOSSES, torch.full((1, 4), float("nan"))])
    mask = torch.cat([MASK, torch.zeros(1, 4, dtype=torch.bool)])
    value, gradient = share(losses, mask, mode)
    assert value == pytest.approx(EXPECTED[mode], abs=1e-6)
    assert (gradient[2] == 0).all()


@pytest.mark.parametrize("mode", EXPECTED)
def test_an_all_masked_batch_gives_zero_and_no_nan(mode):
    mask = torch.zeros_like(MASK)
    value, gradient = share(torch.full_like(LOSSES, float("nan")), mask, mode, num_tokens=0, num_sequences=0)
    assert value == 0
    assert (gradient == 0).all()


@pytest.mark.parametrize("mode", EXPECTED)
@pytest.mark.parametrize("junk", [float("nan"), float("inf"), -float("inf"), 1e30])
def test_masked_entries_change_no_bit(mode, junk):
    value, gradient = share(LOSSES, MASK, mode)
    other_value, other_gradient = share(LOSSES.masked_fill(~MASK, junk), MASK, mode)
    assert other_value == value
    assert torch.equal(other_gradient, gradient)


@pytest.mark.parametrize("mode", EXPECTED)
def test_a_nan_at_a_valid_position_is_not_hidden(mode):
    losses = LOSSES.clone()
    losses[0, 2] = float("nan")
    assert share(losses, MASK, mode)[0] != share(losses, MASK, mode)[0]


RANK_PROGRAM = textwrap.dedent(
    """
    import sys
    from datetime import timedelta
    import torch
    import torch.distributed as dist
    from tests.unit.algorithms.batches import Batch, Totals
    from tranship.algorithms.aggregate import aggregate
    from tranship.algorithms.objective import make_loss
    from tranship.config.schema import AlgorithmConfig

    rank, address, masked_row = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "yes"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    losses = torch.tensor([[1.0, 1, 1, 1], [5, 0, 0, 0]])[rank : rank + 1]
    mask = torch.tensor([[True] * 4, [True, False, False, False]])[rank : rank + 1]
    if rank == 1 and masked_row:
        losses = torch.cat([losses, torch.full((1, 4), float("nan"))])
        mask = torch.cat([mask, torch.zeros(1, 4, dtype=torch.bool)])
    losses.requires_grad_()
    counts = torch.tensor([mask.sum(), mask.any(-1).sum()])
    dist.all_reduce(counts)
    for mode, expected in [("token-mean", 1.8), ("seq-mean-token-sum", 4.5), ("seq-mean-token-mean", 3.0)]:
        losses.grad = None
        loss = aggregate(losses, mask, mode, num_tokens=int(counts[0]), num_sequences=int(counts[1]),
                         max_response_tokens=4)
        loss.backward()
        total = loss.detach().clone()
        dist.all_reduce(total)
        assert abs(total.item() - expected) < 1e-5, (mode, total)
        if mode == "token-mean":
            assert (losses.grad - 0.2 * mask).abs().max() < 1e-6, losses.grad
    # The loss of REINFORCE at advantage -1 is the log-prob: the same numbers through a whole objective.
    losses.grad = None
    loss, _ = make_loss(AlgorithmConfig(loss="reinforce"))(
        Batch(losses, losses.detach(), -torch.ones_like(losses), mask), Totals(int(counts[0]), int(counts[1]))
    )
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    assert abs(total.item() - 1.8) < 1e-5, total
    assert (losses.grad - 0.2 * mask).abs().max() < 1e-6, losses.grad
    dist.destroy_process_group()
    """
)


@pytest.mark.parametrize("masked_row", ["no", "yes"])
def test_split_over_two_ranks_changes_nothing(masked_row, tmp_path):
    address = f"file://{tmp_path}/rendezvous"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK_PROGRAM, str(rank), address, masked_row],
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for rank in range(2)
    ]
    try:
        errors = [rank.communicate(timeout=120)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(errors)
