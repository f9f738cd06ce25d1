"""How a process of a run finds its dock: what may be sent to it when it starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tranship.types import UserError


@dataclass(frozen=True)
class DockAccess:
    """addresses: of the dock's service, "unix:PATH" for its own node and "tcp:HOST:PORT" for others. secret: the run's.
    node: the name of the node that the dock is on. folder: of its payload there; None if that is not shared.
    controllers: stage -> address, of the stages whose controllers have processes of their own.
    """

    addresses: tuple[str, ...]
    secret: bytes = field(repr=False)
    node: str
    folder: str | None = None
    controllers: Mapping[str, str] = field(default_factory=dict)

    def address(self, node: str) -> str:
        """The address for a process on a node: over a file on the dock's own. UserError if it cannot be reached."""
        usable = [one for one in self.addresses if node == self.node or not one.startswith("unix:")]
        if not usable:
            raise UserError(
                f"the dock listens at {self.addresses} alone, and this process is on another node, {node!r}"
            )
        return min(usable, key=lambda one: not one.startswith("unix:"))
