"""Engines of several ranks, whose other ranks live in processes of their own."""

import multiprocessing
import os
import threading
import traceback

import torch

from tests.contract.rollout_lab import fill
from tranship.layouts import Share
from tranship.rollout.native.engine import NativeEngine
from tranship.rollout.native.leader import FollowingEngine, LeadingEngine
from tranship.rollout.native.ranks import Ranks

HOST = "127.0.0.1"
_ANSWER_S = 60


class RankHost:
    """A process that hosts ranks other than first ones, each in a thread. A context."""

    def __init__(self):
        self._process = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self._process is not None:
            self.kill()

    @property
    def pid(self):
        return self._process.pid

    def kill(self):
        self._process.kill()
        self._process.join()

    def start(self, folder, share, settings):
        """The door of a new rank, and its pieces."""
        if self._process is None:
            context = multiprocessing.get_context("spawn")
            self._pipe, theirs = context.Pipe()
            self._process = context.Process(target=_host_ranks, args=(theirs,), daemon=True)
            self._process.start()
            theirs.close()
        self._pipe.send((str(folder), share, settings))
        assert self._pipe.poll(_ANSWER_S), "the process of the ranks does not answer"
        answer = self._pipe.recv()
        assert not isinstance(answer, str), answer
        return answer


def lead(hosts, folder, size, settings):
    """The engine of `size` ranks, of which the first is here; `others_pieces` are those of the others. hosts: of the
    others, one for all of them or a list."""
    ranks, engine = make_rank(folder, Share(0, size), settings)
    leader = LeadingEngine(engine, ranks, HOST)
    hosts = hosts if isinstance(hosts, list) else [hosts] * (size - 1)
    others = [host.start(folder, Share(rank, size), settings) for rank, host in enumerate(hosts, 1)]
    leader.lead([door for door, _ in others])
    leader.others_pieces = [pieces for _, pieces in others]
    return leader


def make_rank(folder, share, settings):
    ranks = Ranks(share, torch.device("cpu"), ordered=settings["deterministic"])
    return ranks, NativeEngine(folder, **settings, ranks=ranks)


def _host_ranks(pipe):
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    while True:
        try:
            folder, share, settings = pipe.recv()
        except EOFError:
            return
        threading.Thread(target=_follow, args=(pipe, folder, share, settings), daemon=True).start()


def _follow(pipe, folder, share, settings):
    torch.set_num_threads(1)
    wakeup = threading.Event()
    try:
        ranks, engine = make_rank(folder, share, settings)
        follower = FollowingEngine(engine, ranks, HOST, wakeup=wakeup, fill=lambda source: fill(engine, source) or True)
    except BaseException:
        pipe.send(traceback.format_exc())
        raise
    pipe.send((follower.door, engine.pieces()))
    while not follower.ended:
        wakeup.clear()
        while follower.poll():
            pass
        wakeup.wait(0.5)
