"""What the first rank of an engine tells the others, and what they say to it, as bytes: msgpack of plain values.

Bytes that are none of it are a ValueError.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import astuple, replace
from typing import Any

import msgpack
import numpy as np

from tranship.rollout.engine import GroupRequest
from tranship.types import Response, SampleId, Sampling

MAX_BYTES = 64 << 20


def pack(name: str, *values: Any) -> bytes:
    """Words, or a method and its arguments: numbers, texts, None, a list of SampleId, a GroupRequest, an array."""
    data = msgpack.packb([name, [_plain(value) for value in values]])
    assert data is not None
    if len(data) > MAX_BYTES:
        raise ValueError(f"{name} of {len(data)} bytes is over the limit of {MAX_BYTES}")
    return data


def unpack(data: bytes, kinds: Mapping[str, tuple[Callable[[Any], Any], ...]]) -> tuple[str, tuple[Any, ...]]:
    """The name and the values. kinds: what makes each value of a name from the plain one."""
    try:
        name, values = msgpack.unpackb(data)
        makers = kinds[name]
        return name, tuple(make(value) for make, value in zip(makers, values, strict=True))
    except (msgpack.UnpackException, LookupError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"malformed: {type(error).__name__}: {error}") from error


def whole(value: Any) -> int:
    """An int."""
    return _of(int, value)


def real(value: Any) -> float:
    """A float."""
    return _of(float, value)


def text(value: Any) -> str:
    """A str."""
    return _of(str, value)


def token_ids(value: Any) -> np.ndarray:
    """int32 [L]."""
    return np.frombuffer(_of(bytes, value), np.int32)


def samples(value: Any) -> tuple[SampleId, ...] | None:
    """Names of samples, or None: all of them."""
    return None if value is None else tuple(map(_sample, value))


def request(value: Any) -> GroupRequest:
    """A GroupRequest."""
    prompt, names, seeds, sampling, partials, goes_on = value
    ids = tuple(map(_sample, names))
    made = None if partials is None else dict(zip(ids, map(_response, ids, partials), strict=True))
    return GroupRequest(
        token_ids(prompt),
        ids,
        tuple(map(whole, seeds)),
        _sampling(sampling),
        None if made is None else {name: response for name, response in made.items() if response is not None},
        _of(bool, goes_on),
    )


def _plain(value: Any) -> Any:
    if isinstance(value, GroupRequest):
        partials = None if value.partials is None else [_parts(value.partials.get(name)) for name in value.samples]
        # The first rank alone reports the likeliest tokens.
        sampling = astuple(replace(value.sampling, top_logprobs=0))
        return [
            _plain(value.prompt_ids),
            value.samples,
            [int(seed) for seed in value.seeds],
            sampling,
            partials,
            value.goes_on,
        ]
    if isinstance(value, np.ndarray):
        return value.astype(np.int32).tobytes()
    return value


def _parts(response: Response | None) -> list[Any] | None:
    if response is None:
        return None
    arrays = (response.token_ids, response.logprobs, response.policy_versions)
    kinds = (np.int32, np.float32, np.int32)
    return [array.astype(kind).tobytes() for array, kind in zip(arrays, kinds, strict=True)] + [response.finish_reason]


def _response(name: SampleId, value: Any) -> Response | None:
    if value is None:
        return None
    ids, logprobs, versions, reason = value
    return Response(
        name, token_ids(ids), np.frombuffer(_of(bytes, logprobs), np.float32), token_ids(versions), _reason(reason)
    )


def _reason(value: Any) -> Any:
    if value not in ("stop", "length", "abort"):
        raise ValueError(f"{value!r} is no finish reason")
    return value


def _sampling(value: Any) -> Sampling:
    cap, temperature, top_p, top_k, min_p, ids, strings, top = value
    return Sampling(
        max_response_tokens=whole(cap),
        temperature=float(temperature),
        top_p=float(top_p),
        top_k=whole(top_k),
        min_p=float(min_p),
        stop_token_ids=tuple(map(whole, ids)),
        stop_strings=tuple(map(text, strings)),
        top_logprobs=whole(top),
    )


def _sample(value: Any) -> SampleId:
    group_id, sample_index, attempt = value
    return SampleId(whole(group_id), whole(sample_index), whole(attempt))


def _of(kind: Any, value: Any) -> Any:
    if type(value) is not kind:
        raise ValueError(f"{value!r:.100} is no {kind.__name__}")
    return value
