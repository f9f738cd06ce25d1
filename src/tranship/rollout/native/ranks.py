"""What the ranks of a tensor-parallel engine compute together: sums, whole rows of logits, one draw for all.

The collectives are torch.distributed's, of the backend that belongs to the device. They know no model.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch import distributed

from tranship.layouts import Share
from tranship.rollout.engine import RankLost

COLLECTIVE_S = 60.0
"""A collective that takes longer has lost a rank. One that ended is noticed at once."""


class Ranks:
    """The collectives, as one of the ranks takes part in them. Every rank must call the same ones in the same order.

    Any of them raises RankLost if another rank does not take part. ordered: sums are added rank by rank, so that they
    do not depend, to the bit, on how a backend cuts its buffers. `open` or `enter` must come before the first.
    """

    def __init__(self, share: Share, device: torch.device, *, ordered: bool) -> None:
        self.share = share
        self._device = device
        self._ordered = ordered
        self._group: Any = None

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's tensor. It may be written to `x`, which must be contiguous."""
        if self._ordered:
            first, *others = self._gather(x)
            for other in others:
                first += other
            return first
        self._wait(lambda group: group.allreduce([x]))
        return x

    def columns(self, x_NC: torch.Tensor) -> torch.Tensor:
        """[N, C x ranks]: every rank's columns beside each other."""
        return torch.cat(self._gather(x_NC.contiguous()), 1)

    def agree(self, drawn: tuple[np.ndarray, np.ndarray] | None, count: int) -> tuple[np.ndarray, np.ndarray]:
        """What the first rank has drawn: tokens int64 [count] and log-probs float32 [count]. The others give None."""
        packed = torch.empty(2, count, dtype=torch.int64)
        if drawn is not None:
            tokens_N, logprobs_N = drawn
            packed[0] = torch.from_numpy(tokens_N)
            packed[1] = torch.from_numpy(logprobs_N.view(np.int32)).long()
        on_device = packed.to(self._device)
        self._wait(lambda group: group.broadcast([on_device], _from_first()))
        tokens, bits = on_device.cpu().numpy()
        return tokens, bits.astype(np.int32).view(np.float32)

    def open(self, host: str) -> tuple[int, Any]:
        """Begin to meet, as the first rank: the port on `host` where the others `enter`, and what `meet` takes."""
        listener = socket.create_server((host, 0))
        port = listener.getsockname()[1]
        store = distributed.TCPStore(
            host,
            port,
            self.share.size,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=COLLECTIVE_S),
            master_listen_fd=listener.detach(),
        )
        return port, store

    def enter(self, leader_host: str, port: int) -> Any:
        """The same as another rank: what `meet` takes."""
        limit = timedelta(seconds=COLLECTIVE_S)
        try:
            return distributed.TCPStore(leader_host, port, self.share.size, is_master=False, timeout=limit)
        except RuntimeError as error:
            raise RankLost(f"the first rank cannot be reached: {_first_line(error)}") from error

    def meet(self, store: Any, host: str) -> None:
        """Return once every rank is here. host: the address under which the others reach this one."""
        try:
            self._group = _process_group(self._device, store, self.share, host)
        except RuntimeError as error:
            raise RankLost(f"the {self.share.size} ranks did not meet: {_first_line(error)}") from error

    def close(self) -> None:
        """Take part no more: the others' collectives fail at once."""
        self._group = None

    def _gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        parts = [torch.empty_like(x) for _ in range(self.share.size)]
        self._wait(lambda group: group.allgather([parts], [x]))
        return parts

    def _wait(self, start: Any) -> None:
        assert self._group is not None, "the ranks have not met"
        try:
            start(self._group).wait()
        except RuntimeError as error:
            raise RankLost(f"another rank is gone: {_first_line(error)}") from error


def _from_first() -> Any:
    options = distributed.BroadcastOptions()
    options.rootRank = 0
    return options


def _process_group(device: torch.device, store: Any, share: Share, host: str) -> Any:
    """On a CPU a group of its own, which listens on `host` alone; elsewhere the process's default group."""
    limit = timedelta(seconds=COLLECTIVE_S)
    if device.type == "cpu":
        gloo: Any = distributed.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=host)]
        options._timeout = limit
        return gloo(store, share.rank, share.size, options)
    backend = distributed.get_default_backend_for_device(device)
    distributed.init_process_group(backend, store=store, rank=share.rank, world_size=share.size, timeout=limit)
    return distributed.group.WORLD


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
