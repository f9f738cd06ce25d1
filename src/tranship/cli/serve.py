"""`tranship serve`: a model behind OpenAI's API, for clients that users already have."""

from __future__ import annotations

import ipaddress
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

import typer

from tranship.cli.threads import let_idle_threads_sleep
from tranship.types import UserError


class Dtype(StrEnum):
    """The precision of weights and cache."""

    fp32 = "fp32"
    bf16 = "bf16"


def serve(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A model's folder or name, a run's folder, or one of its checkpoints.",
            show_default=False,
        ),
    ],
    name: Annotated[
        str | None, typer.Option(help="What requests call it; else MODEL as it was given.", show_default=False)
    ] = None,
    host: Annotated[
        str, typer.Option(help="The address to listen on; the default is reached from this machine alone.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = 8000,
    token_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Holds the token that clients show; made if it is not there. Without: a new token is printed.",
            show_default=False,
        ),
    ] = None,
    engine: Annotated[str, typer.Option(help="An entry of the table of rollout engines, or file.py:Class.")] = "native",
    dtype: Annotated[Dtype, typer.Option(help="The precision of weights and cache.")] = Dtype.fp32,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, npu.")] = "auto",
    max_running: Annotated[int, typer.Option(min=1, help="Samples that are decoded at the same time.")] = 16,
    max_tokens: Annotated[
        int | None,
        typer.Option(min=2, help="Longest prompt and response together; else the model's context.", show_default=False),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads that compute; else all cores.", show_default=False)
    ] = None,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Answers do not depend, to the bit, on what else is asked.")
    ] = False,
) -> int:
    """Answer requests of OpenAI's API with a model.

    Completions and chat, streams, log-probs, token ids. Listens on this machine alone unless told otherwise.
    """
    missing = [package for package in ("starlette", "uvicorn") if find_spec(package) is None]
    if missing:
        raise UserError(f"tranship serve needs {' and '.join(missing)}: pip install 'tranship[serve]'")
    let_idle_threads_sleep()
    from tranship.serve import Address, EngineSettings, load_served, read_token
    from tranship.serve import serve as run
    from tranship.trainer.trained import find_model

    found = find_model(model)
    precision: Literal["fp32", "bf16"] = "bf16" if dtype is Dtype.bf16 else "fp32"
    settings = EngineSettings(
        engine=engine,
        dtype=precision,
        device=device,
        max_running=max_running,
        max_tokens=max_tokens,
        threads=threads,
        deterministic=deterministic,
    )
    token = read_token(token_file)
    loaded = load_served(found.folder, name or model, settings, found.policy_version)
    _say(*loaded.lines(), f"token     {token if token_file is None else f'in {token_file}'}")
    if not _loopback(host):
        _say(f"note      {host} can be reached from elsewhere, and nothing is encrypted: token, prompts and answers")
    run(
        loaded, Address(host, port, token), lambda url: _say(f"serving   {url} as {loaded.served.name!r}, until Ctrl-C")
    )
    _say("end: stopped")
    return 0


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _say(*lines: str) -> None:
    print("\n".join(lines), flush=True)
