"""Values that are not plain arrays, as bytes: msgpack with three extensions. Never pickle, so nothing can be run.

None, bool, int (64 bits), float, str, bytes, list, tuple, dict, arrays and numpy scalars come back equal and in the
same type; anything else is refused when it is packed.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import msgpack
import numpy as np

_ARRAY, _TUPLE, _SCALAR = 1, 2, 3
_ARRAY_HEAD = struct.Struct("<BB")
_MAX_NDIM = 32

DTYPE_NAMES = (
    "bool",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "float32",
    "float64",
)
DTYPES = tuple(np.dtype(name).newbyteorder("<") for name in DTYPE_NAMES)
_CODES = {name: code for code, name in enumerate(DTYPE_NAMES)}
BFLOAT16 = len(DTYPES)  # stored as uint16


@dataclass(frozen=True, eq=False)
class Bfloat16:
    """An array of bfloat16, which numpy does not have: the upper halves of float32 numbers, as uint16 of any shape."""

    bits: np.ndarray

    def __post_init__(self) -> None:
        assert self.bits.dtype == np.uint16, self.bits.dtype

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Bfloat16) and np.array_equal(self.bits, other.bits)

    __hash__ = None  # type: ignore[assignment]

    def to_float32(self) -> np.ndarray:
        """The numbers, exactly."""
        return (self.bits.astype(np.uint32) << 16).view(np.float32)


def dtype_of(code: int) -> np.dtype:
    """The stored dtype of a code. ValueError for an unknown one."""
    if code == BFLOAT16:
        return DTYPES[_CODES["uint16"]]
    if not 0 <= code < len(DTYPES):
        raise ValueError(f"unknown dtype code {code}")
    return DTYPES[code]


@lru_cache(maxsize=256)
def code_of(dtype: np.dtype) -> int | None:
    """The code of a dtype of either byte order; None if it cannot be stored."""
    return _CODES.get(dtype.name) if dtype.names is None else None


def pack_value(value: Any) -> bytes:
    """The bytes of a value. ValueError names what cannot be carried."""
    try:
        return _pack(value)
    except (TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"a value cannot be carried: {error}") from error


def unpack_value(data: bytes | memoryview) -> Any:
    """The value of some bytes. ValueError if they are malformed."""
    try:
        return _unpack(data)
    except (TypeError, OverflowError, RecursionError, struct.error, msgpack.UnpackException) as error:
        raise ValueError(f"malformed value: {error}") from error


def _pack(value: Any) -> bytes:
    packer = msgpack.Packer(default=_extend, strict_types=True, use_bin_type=True, unicode_errors="surrogatepass")
    data = packer.pack(value)
    assert data is not None
    return data


def _unpack(data: bytes | memoryview) -> Any:
    return msgpack.unpackb(
        data, ext_hook=_restore, raw=False, strict_map_key=False, use_list=True, unicode_errors="surrogatepass"
    )


def _extend(value: Any) -> msgpack.ExtType:
    kind = type(value)
    if kind is tuple:
        return msgpack.ExtType(_TUPLE, _pack(list(value)))
    if kind is np.ndarray or kind is Bfloat16:
        return msgpack.ExtType(_ARRAY, _pack_array(value))
    if isinstance(value, np.generic):
        return msgpack.ExtType(_SCALAR, _pack_array(np.asarray(value)))
    raise TypeError(
        f"{kind.__module__}.{kind.__qualname__}: use None, bool, int, float, str, bytes, list, dict or arrays"
    )


def _pack_array(value: np.ndarray | Bfloat16) -> bytes:
    array = value.bits if isinstance(value, Bfloat16) else value
    code = BFLOAT16 if isinstance(value, Bfloat16) else code_of(array.dtype)
    if code is None:
        raise TypeError(f"an array of dtype {array.dtype}: use numbers or bool")
    head = _ARRAY_HEAD.pack(code, array.ndim) + struct.pack(f"<{array.ndim}q", *array.shape)
    return head + array.astype(dtype_of(code), copy=False).tobytes()


def _restore(code: int, data: bytes) -> Any:
    if code == _TUPLE:
        items = _unpack(data)
        if type(items) is not list:
            raise ValueError("malformed value: a tuple without items")
        return tuple(items)
    if code == _ARRAY:
        return _unpack_array(data)
    if code == _SCALAR:
        array = _unpack_array(data)
        if isinstance(array, Bfloat16) or array.ndim:
            raise ValueError("malformed value: a scalar with a shape")
        return array[()]
    raise ValueError(f"malformed value: unknown extension {code}")


def _unpack_array(data: bytes) -> np.ndarray | Bfloat16:
    code, ndim = _ARRAY_HEAD.unpack_from(data)
    if ndim > _MAX_NDIM:
        raise ValueError(f"malformed value: an array of {ndim} dimensions")
    shape = struct.unpack_from(f"<{ndim}q", data, _ARRAY_HEAD.size)
    start = _ARRAY_HEAD.size + 8 * ndim
    if min(shape, default=0) < 0 or (len(data) - start) % dtype_of(code).itemsize:
        raise ValueError("malformed value: an array of impossible size")
    array = np.frombuffer(data, dtype_of(code), offset=start).reshape(shape)
    return Bfloat16(array) if code == BFLOAT16 else array
