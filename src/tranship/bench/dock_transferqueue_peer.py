"""The side of TransferQueue in `bench dock`, run by the interpreter of its own environment (`make bench-env`).

Used as its own performance test uses it: clients in Ray actors, `kv_batch_put` and `kv_batch_get` of a TensorDict on
its SimpleStorage with two units. The nested tensors are made before the clock starts, and clearing is not timed.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import metadata

import numpy as np
import ray
import torch
import transfer_queue as tq
from dock_work import COLUMNS, RAGGED, Setting, check, now, rows, span
from omegaconf import OmegaConf
from tensordict import TensorDict

_CONFIG = {"backend": {"storage_backend": "SimpleStorage", "SimpleStorage": {"num_data_storage_units": 2}}}


@ray.remote(num_cpus=0)
class Mover:
    """A client that puts rows, or gets them."""

    def __init__(self):
        tq.init(OmegaConf.create(_CONFIG))
        self._keys, self._fields = [], None

    def prepare(self, first, count, longest):
        made = rows(range(first, first + count), longest)
        fields = {}
        for name in RAGGED:
            tensors = [torch.from_numpy(value) for value in made[name]]
            fields[name] = torch.nested.as_nested_tensor(tensors, layout=torch.jagged)
        fields["reward"] = torch.from_numpy(np.array(made["reward"], np.float32).reshape(-1, 1))
        self._keys = [str(number) for number in range(first, first + count)]
        self._fields = TensorDict(fields, batch_size=[count])

    def put(self):
        start = now()
        tq.kv_batch_put(keys=self._keys, partition_id="bench", fields=self._fields)
        return start, now()

    def get(self, keys, longest, checked):
        start = now()
        got = tq.kv_batch_get(keys=keys, partition_id="bench", select_fields=list(COLUMNS))
        end = now()
        if checked:
            columns = {name: [value.numpy() for value in got[name].unbind()] for name in COLUMNS}
            check([int(key) for key in keys], columns, longest)
        return start, end

    def clear(self, keys):
        tq.kv_clear(keys=keys, partition_id="bench")


class Side:
    """The clients, on a Ray of their own."""

    def __init__(self):
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        ray.init(
            address="local", include_dashboard=False, log_to_driver=False, num_cpus=16, object_store_memory=1 << 30
        )
        tq.init(OmegaConf.create(_CONFIG))
        self._movers, self._prepared = {}, {}

    def round(self, producers, consumers, batch, longest, repeats, checked):
        setting = Setting(producers, consumers, batch, longest)
        putting = [self._one(f"p{i}") for i in range(producers)]
        getting = [self._one(f"c{i}") for i in range(consumers)]
        for i, mover in enumerate(putting):
            share = setting.share(i)
            wanted = (share.start, len(share), longest)
            if self._prepared.get(i) != wanted:
                ray.get(mover.prepare.remote(*wanted))
                self._prepared[i] = wanted
        each = batch // consumers
        shares = [[str(number) for number in range(i * each, (i + 1) * each)] for i in range(consumers)]
        puts, gets = [], []
        for _ in range(repeats):
            puts.append(span(ray.get([mover.put.remote() for mover in putting])))
            asked = zip(getting, shares, strict=True)
            gets.append(span(ray.get([mover.get.remote(keys, longest, checked) for mover, keys in asked])))
            ray.get(putting[0].clear.remote([key for keys in shares for key in keys]))
        return {"put_s": puts, "get_s": gets}

    def _one(self, name):
        if name not in self._movers:
            self._movers[name] = Mover.remote()
        return self._movers[name]


def main():
    """Answer lines of JSON until the input ends."""
    # What the libraries print goes to the log: the real standard output carries the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    side = Side()
    packages = ("TransferQueue", "ray", "torch", "tensordict")
    handlers = {"round": side.round, "versions": lambda: {name: metadata.version(name) for name in packages}}
    for line in sys.stdin:
        message = json.loads(line)
        result = handlers[message.pop("do")](**message)
        print(json.dumps(result), file=answers, flush=True)


if __name__ == "__main__":
    main()
