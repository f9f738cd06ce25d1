"""Immutable arrays in Ray's object store: shared memory on a node, fetched once from others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from tranship.types import RunError

if TYPE_CHECKING:
    import numpy as np


class RayObjects:
    """The object store of a Ray cluster; a reference is a Ray ObjectRef."""

    def put(self, array: np.ndarray) -> Any:
        """Copy `array` into the store."""
        return ray.put(array)

    def get(self, ref: Any, timeout_s: float) -> np.ndarray:
        """A read-only view of the stored array; it stays in the store as long as the view lives."""
        try:
            return ray.get(ref, timeout=timeout_s)
        except GetTimeoutError as error:
            raise RunError(f"a stored array did not arrive within {timeout_s:g} s") from error
        except RayError as error:
            raise RunError(f"a stored array is lost: {str(error).splitlines()[0]}") from error
