"""A model on several ranks gives what it gives on one, in every family; a rank that is gone is an error, not a wait."""

import os
import signal
import socket
import time
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.contract.rank_host import HOST, RankHost, lead, make_rank
from tests.contract.rollout_lab import update
from tests.unit.rollout.conftest import ENGINE_SETTINGS, VOCAB
from tranship.layouts import Layout, Piece, Share, full_box
from tranship.reshard import WeightSink, WeightSource, check_landed, make_plan
from tranship.rollout import RankLost, SamplesFailed
from tranship.rollout.native import NativeEngine, load_folder
from tranship.rollout.native.leader import Door, LeadingEngine
from tranship.rollout.native.ranks import Ranks
from tranship.types import RunError, SampleId, UserError

CASES = {
    "llama": {"family": "llama", "attention_bias": True, "mlp_bias": True},
    "llama, head of its own": {"family": "llama", "tied": False},
    "llama, one key head": {"family": "llama", "num_key_value_heads": 1},
    "qwen2": {"family": "qwen2"},
    "qwen3": {"family": "qwen3"},
    "qwen3_moe": {"family": "qwen3_moe"},
    "deepseek_v2": {"family": "deepseek_v2"},
    "deepseek_v3": {"family": "deepseek_v3", "attention_bias": True},
}


@pytest.fixture(scope="module")
def rank_host():
    with RankHost() as host:
        yield host


@pytest.fixture
def split(lab, rank_host):
    """Makes an engine of several ranks, without weights."""
    led = []

    def make(folder, size=2, hosts=rank_host, **settings):
        led.append(lead(hosts, folder, size, ENGINE_SETTINGS | settings))
        return led[-1]

    yield make
    for engine in led:
        engine.close()


def requests(lab):
    shared, other = lab.prompt(1, 30), lab.prompt(2, 9)
    return lab.group(0, shared), lab.group(1, other, count=3, temperature=0.0), lab.group(2, shared, count=2, top_p=0.8)


@pytest.mark.parametrize("case", CASES)
def test_every_family_gives_the_same_on_two_ranks(lab, split, case):
    folder = lab.folder(**CASES[case])
    whole, parted = lab.engine(folder), split(folder)
    update(parted, folder, 0)
    probe = lab.prompt(5, 40)
    assert np.abs(parted.probe(probe) - whole.probe(probe)).max() <= 1e-5
    wanted, done = (lab.run(engine, *requests(lab)) for engine in (whole, parted))
    assert wanted.keys() == done.keys()
    for sample, response in done.items():
        assert np.array_equal(response.token_ids, wanted[sample].token_ids)
        assert np.abs(response.logprobs - wanted[sample].logprobs).max() <= 1e-5


def test_bf16_is_as_near_to_fp32_on_two_ranks_as_on_one(lab, split):
    folder, probe = lab.folder("qwen3"), lab.prompt(5, 40)
    exact = lab.engine(folder).probe(probe)
    parted = split(folder, dtype="bf16")
    update(parted, folder, 0)
    gaps = [np.abs(engine.probe(probe) - exact).mean() for engine in (lab.engine(folder, dtype="bf16"), parted)]
    assert gaps[1] <= 2 * gaps[0], gaps


def test_more_ranks_than_key_heads_and_a_rest_of_the_vocabulary(lab, split):
    folder = lab.folder("llama", num_attention_heads=6, num_key_value_heads=1, intermediate_size=96)
    parted = split(folder, size=3)
    update(parted, folder, 0)
    probe = lab.prompt(5, 40)
    assert VOCAB % 3, "the last rank has fewer rows than the others"
    assert np.abs(parted.probe(probe) - lab.engine(folder).probe(probe)).max() <= 1e-5


@pytest.mark.parametrize("case", ["qwen3", "qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("size", [2, 3])
def test_in_deterministic_mode_a_sample_does_not_depend_on_its_neighbours(lab, split, case, size):
    folder = lab.folder(CASES[case]["family"], num_attention_heads=6, num_key_value_heads=6, intermediate_size=96)
    engine = split(folder, size=size, deterministic=True, max_running=13)
    update(engine, folder, 0)
    prompt = lab.prompt(3, 21)
    alone = {}
    for index in range(3):
        alone |= lab.run(engine, lab.group(0, prompt, count=1, first=index))
    engine.submit(lab.group(5, lab.prompt(9, 60), count=3, max_response_tokens=50))
    for _ in range(7):
        engine.step()
    engine.submit(lab.group(6, lab.prompt(8, 2), count=1, max_response_tokens=4))
    engine.submit(lab.group(0, prompt, count=3))
    done = {}
    for _ in range(9):
        done |= {response.sample: response for response in engine.step()}
    stopped = engine.abort([SampleId(5, 0), SampleId(0, 1)])
    again = lab.group(0, prompt, count=1, first=1, partials={response.sample: response for response in stopped})
    done |= lab.run(engine, lab.group(7, lab.prompt(4, 5), count=5), again)
    for sample, response in alone.items():
        assert np.array_equal(response.token_ids, done[sample].token_ids)
        assert np.array_equal(response.logprobs, done[sample].logprobs)


@pytest.mark.parametrize("case", ["llama, one key head", "qwen3_moe", "deepseek_v3"])
def test_weights_reach_every_rank_by_the_plan_with_their_digests(lab, case):
    """Only what a rank holds is moved to it, and what lies there is what was sent."""
    folder = lab.folder(**CASES[case])
    tensors = load_file(folder / "model.safetensors")
    source = tuple(
        Piece(name, tuple(t.shape), full_box(tuple(t.shape)), name, full_box(tuple(t.shape)), str(t.dtype)[6:])
        for name, t in tensors.items()
    )
    engines = [
        NativeEngine(folder, **ENGINE_SETTINGS, ranks=Ranks(Share(rank, 2), torch.device("cpu"), ordered=False))
        for rank in range(2)
    ]
    layout = Layout(tuple(tuple(engine.pieces()) for engine in engines))
    plan = make_plan(Layout((source,)), layout, bucket_bytes=1 << 14)
    stored = []
    announcement = WeightSource(plan, tensors.__getitem__).publish(
        7, lambda array: stored.append(array.copy()) or len(stored) - 1
    )
    for rank, engine in enumerate(engines):
        assert WeightSink(plan, engine.storage, rank).pull([announcement], stored.__getitem__) == 7
        check_landed(plan, announcement.manifest, engine.storage, rank)
        for piece in engine.pieces():
            there = engine.storage(piece.storage)[tuple(slice(*bounds) for bounds in piece.storage_box)]
            wanted = tensors[piece.name][tuple(slice(*bounds) for bounds in piece.box)]
            assert torch.equal(there.reshape(wanted.shape), wanted)
    split_bytes = sum(t.numel() * t.element_size() for name, t in tensors.items() if "mlp.experts" in name)
    whole = sum(t.numel() * t.element_size() for t in tensors.values())
    moved = [sum(bucket.num_bytes for bucket in plan.buckets if bucket.target_rank == rank) for rank in range(2)]
    assert max(moved) <= whole - split_bytes // 2 + 64 * len(tensors)


def test_what_cannot_be_given_out_in_equal_parts_is_refused_with_the_numbers(lab):
    def make(size, **config):
        ranks = Ranks(Share(0, size), torch.device("cpu"), ordered=False)
        return NativeEngine(lab.folder(**config), **ENGINE_SETTINGS, ranks=ranks)

    with pytest.raises(
        UserError, match=r"tensor_parallel 4 does not divide the model's 6 attention heads.*use one of 1, 2"
    ):
        make(4)
    with pytest.raises(UserError, match="intermediate size of 160"):
        make(3)
    with pytest.raises(UserError, match="4 key heads"):
        make(3, num_attention_heads=12, num_key_value_heads=4, intermediate_size=96)
    with pytest.raises(UserError, match=r"experts' width of 50"):
        make(4, family="qwen3_moe", num_attention_heads=8, moe_intermediate_size=50)


def stop_the_other(lab, split, number):
    """An engine in the middle of its samples, whose other rank has just got a signal; the process of that rank."""
    with RankHost() as host:
        folder = lab.folder()
        engine = split(folder, hosts=host)
        update(engine, folder, 0)
        engine.submit(lab.group(0, lab.prompt(1)))
        for _ in range(3):
            engine.step()
        os.kill(host.pid, number)
        yield engine
    yield host


def test_a_killed_rank_is_an_error_at_once_and_from_then_on(lab, split):
    stopped = stop_the_other(lab, split, signal.SIGKILL)
    engine = next(stopped)
    start = time.monotonic()
    with pytest.raises(RankLost, match="rank 1 of the rollout engine is gone"):
        engine.step()
    with pytest.raises(RankLost, match="rank 1"):
        engine.probe(lab.prompt(1))
    with pytest.raises(RankLost, match="rank 1"):
        engine.begin_update()
    assert time.monotonic() - start < 10
    assert len(engine.abort()) == 4, "what its samples have is still there"
    next(stopped)


def test_a_rank_that_is_held_is_an_error_after_a_limit(lab, split, monkeypatch):
    monkeypatch.setattr("tranship.rollout.native.ranks.COLLECTIVE_S", 3.0)
    stopped = stop_the_other(lab, split, signal.SIGSTOP)
    engine = next(stopped)
    start = time.monotonic()
    with pytest.raises(RankLost, match="another rank is gone"):
        engine.step()
    assert time.monotonic() - start < 15
    next(stopped)


def test_a_rank_that_fails_says_why(lab, split, tmp_path):
    engine = split(lab.folder())
    engine.begin_update()
    engine.fill(str(tmp_path / "nowhere"))
    with pytest.raises(RunError, match=r"rank 1 of the rollout engine has failed: FileNotFoundError.*nowhere") as error:
        engine.finish_update(0)
    assert not isinstance(error.value, RankLost), "starting it again would not help"


def test_between_two_calls_the_first_rank_can_ask_whether_the_others_are_there(lab, split):
    stopped = stop_the_other(lab, split, signal.SIGKILL)
    engine = next(stopped)
    with pytest.raises(RankLost, match="rank 1 of the rollout engine is gone"):
        wait_until_it_raises(engine.check)
    with pytest.raises(RankLost):
        engine.check()
    next(stopped)


def wait_until_it_raises(check):
    for _ in range(100):
        check()
        time.sleep(0.1)


def test_a_rank_that_was_never_met_ends_quietly_and_strangers_are_sent_away(lab, split, rank_host):
    ranks, engine = make_rank(lab.folder(), Share(0, 2), ENGINE_SETTINGS)
    leader = LeadingEngine(engine, ranks, HOST)
    assert leader.abort() == []
    leader.close()

    door, _ = rank_host.start(lab.folder(), Share(1, 2), ENGINE_SETTINGS)
    socket.create_connection(door.address).close()
    with socket.create_connection(door.address) as other_protocol, suppress(ConnectionError):
        other_protocol.sendall(b"GET / HTTP/1.1\r\n\r\n")
        while other_protocol.recv(64):
            pass
    silent = socket.create_connection(door.address)
    with pytest.raises(AuthenticationError):
        Client(door.address, authkey=b"guess")
    with pytest.raises(RankLost, match="a rank of the rollout engine cannot be reached"):
        LeadingEngine(engine, ranks, HOST).lead([Door(door.address, b"guess")])
    leader = LeadingEngine(engine, ranks, HOST)
    leader.lead([door])
    leader.close()
    silent.close()


def test_an_update_that_gives_the_others_no_weights_is_a_bug(lab, split):
    engine = split(lab.folder())
    engine.check()
    with pytest.raises(AssertionError, match="fill"):
        load_folder(engine, lab.folder(), 0)


def test_a_rank_that_has_other_samples_than_the_first_stops_the_engine(lab, split):
    folder = lab.folder()
    engine = split(folder)
    update(engine, folder, 0)
    engine._engine.submit(lab.group(3, lab.prompt(1)))
    with pytest.raises(RunError, match="rank 1 of the rollout engine has failed: AssertionError: this rank"):
        engine.step()


def test_samples_whose_logits_are_not_finite_are_dropped_on_every_rank(lab, split):
    folder = lab.folder()
    engine = split(folder)
    update(engine, folder, 0)
    engine.begin_update()
    engine.fill(str(folder))
    engine.storage("layers.0.down").fill_(float("nan"))
    engine.finish_update(1)
    engine.submit(lab.group(0, lab.prompt(1)))
    with pytest.raises(SamplesFailed) as error:
        engine.step()
    assert len(error.value.samples) == 4
    update(engine, folder, 2)
    assert len(lab.run(engine, lab.group(0, lab.prompt(1)))) == 4
