"""The sample flow on paper: bytes and messages per node and iteration for 1 to 1,024 nodes, of three designs.

    python scripts/dock_on_paper.py [--json BENCH_DOCK.json] [--png docs/dock_on_paper.png] [--wide]

central    one process holds all columns of all rows (what most open systems do)
hashed     each row lies on the node that its identity hashes to, a message per sample and column: spread, but nearly
           all bytes cross the network twice
tranship   what is written stays on the node that wrote it; whoever reads it elsewhere fetches it, once

It counts what the dataflow table of GRPO with a reference model moves; seconds follow from rates that `tranship bench
dock --json` measured on one machine. It is arithmetic, not a measurement of a cluster: the nodes are equal, network
and stages are ideal, and rows are read on whatever node is free. In this version the dock's payload lies on one node;
the third column is the design with a warehouse on each.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

NODES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
SAMPLES_PER_NODE, GROUP = 256, 8
PROMPT_TOKENS, RESPONSE_TOKENS = 1_000, 8_000
NIC_BYTES_PER_S = 12.5e9  # 100 Gbit/s
FRAMES_PER_S = 50e3  # 20 us a frame go into Python and lock hand-over, measured
COLUMNS = {  # bytes of one sample
    "prompt": 4 * PROMPT_TOKENS / GROUP,  # once per group
    "response": 4 * RESPONSE_TOKENS,
    "response_mask": RESPONSE_TOKENS,
    "logprobs": 4 * RESPONSE_TOKENS,
    "policy_versions": 4 * RESPONSE_TOKENS,
    "reward": 64,
    "ref_logprobs": 4 * RESPONSE_TOKENS,
    "advantages": 4 * RESPONSE_TOKENS,
}
ROUTING = 48 * 8 * (PROMPT_TOKENS + RESPONSE_TOKENS)  # 48 layers, the best 8 of up to 256 experts, a byte each
STAGES = {  # name: (reads, writes)
    "prompts": ((), ("prompt",)),
    "rollout": (("prompt",), ("response", "response_mask", "logprobs", "policy_versions")),
    "reward": (("prompt", "response"), ("reward",)),
    "reference": (("prompt", "response"), ("ref_logprobs",)),
    "advantage": (("reward", "response_mask"), ("advantages",)),
    "train": (("prompt", "response", "response_mask", "logprobs", "ref_logprobs", "advantages"), ()),
}


@dataclass(frozen=True)
class Rates:
    """Measured: bytes a second through a central process (in and out), and samples a second of a controller."""

    central_bytes_per_s: float = 2 * 43.6e6 / 0.149
    controller_samples_per_s: float = 1.28e6


@dataclass(frozen=True)
class Load:
    """Of the busiest node in one iteration: bytes through its network card (in and out), messages to its process, and
    the seconds that the slower of card and process needs."""

    network_bytes: float
    messages: float
    seconds: float


def moved(wide: bool) -> tuple[float, float]:
    """(written, read) bytes of one node's samples in one iteration."""
    columns = COLUMNS | ({"routing": ROUTING} if wide else {})
    extra = {"rollout": ((), ("routing",)), "train": (("routing",), ())} if wide else {}
    written = read = 0.0
    for name, (reads, writes) in STAGES.items():
        more_reads, more_writes = extra.get(name, ((), ()))
        read += sum(columns[column] for column in (*reads, *more_reads))
        written += sum(columns[column] for column in (*writes, *more_writes))
    return written * SAMPLES_PER_NODE, read * SAMPLES_PER_NODE


def loads(nodes: int, rates: Rates, wide: bool) -> dict[str, Load]:
    """The busiest node's load under each design."""
    written, read = moved(wide)
    away = 1 - 1 / nodes
    num_columns = sum(len(reads) + len(writes) for reads, writes in STAGES.values())
    num_turns = len(STAGES) - 1
    through = nodes * (written + read)
    central = Load(through * away, nodes * 2 * num_turns, through / rates.central_bytes_per_s)
    crossing = 2 * away * (written + read)
    hashed_messages = SAMPLES_PER_NODE * num_columns
    hashed = Load(crossing, hashed_messages, max(crossing / NIC_BYTES_PER_S, hashed_messages / FRAMES_PER_S))
    fetched = 2 * away * read
    control = nodes * SAMPLES_PER_NODE * num_turns / rates.controller_samples_per_s
    ours = Load(fetched, nodes * 2 * num_turns, max(fetched / NIC_BYTES_PER_S, control))
    return {"central": central, "hashed": hashed, "tranship": ours}


def rates_of(path: Path) -> Rates:
    """Rates of a file that `tranship bench dock --json` wrote."""
    figures = json.loads(path.read_text())
    assert figures.get("round_trip_ms_4x4_central"), (
        f"{path} has no round_trip_ms_4x4_central: bench dock with all sides"
    )
    seconds = figures["round_trip_ms_4x4_central"] / 1e3
    return Rates(2 * 43.6e6 / seconds, figures["controller_samples_per_s"])


def table(rates: Rates, wide: bool) -> str:
    """The loads as text."""
    lines = [f"{'nodes':>6} | {'GB through the busiest card':^32} | {'messages to the busiest process':^32} | seconds"]
    names = ("central", "hashed", "tranship")
    lines.append(f"{'':>6} | " + " | ".join(" ".join(f"{name:>10}" for name in names) for _ in range(3)))
    for nodes in NODES:
        found = loads(nodes, rates, wide)
        parts = [
            " ".join(f"{found[name].network_bytes / 1e9:>10.3f}" for name in names),
            " ".join(f"{found[name].messages:>10,.0f}" for name in names),
            " ".join(f"{found[name].seconds:>10.3f}" for name in names),
        ]
        lines.append(f"{nodes:>6} | " + " | ".join(parts))
    return "\n".join(lines)


def draw(path: Path, rates: Rates, wide: bool) -> None:
    """The loads as a picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    titles = (
        "bytes through the busiest network card",
        "messages to the busiest process",
        "seconds of the busiest part",
    )
    for axis, title, name in zip(axes, titles, ("network_bytes", "messages", "seconds"), strict=True):
        for design, style in (("central", "s--"), ("hashed", "^:"), ("tranship", "o-")):
            values = [getattr(loads(nodes, rates, wide)[design], name) for nodes in NODES]
            axis.plot(NODES, values, style, label=design, markersize=4)
        axis.set(xscale="log", yscale="log", xlabel="nodes", title=title)
        axis.set_xticks(NODES[::2], [str(nodes) for nodes in NODES[::2]])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].legend()
    figure.suptitle("On paper: one iteration, 256 samples a node, 9,000 tokens each", fontsize=10)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Print the table, and draw it."""
    parser = argparse.ArgumentParser(description="The sample flow on paper, for 1 to 1,024 nodes.")
    parser.add_argument("--json", type=Path, help="figures of `tranship bench dock --json`")
    parser.add_argument("--png", type=Path)
    parser.add_argument("--wide", action="store_true", help="with routing replay of a mixture of experts")
    given = parser.parse_args()
    rates = rates_of(given.json) if given.json else Rates()
    print(table(rates, given.wide))
    if given.png:
        draw(given.png, rates, given.wide)


if __name__ == "__main__":
    main()
