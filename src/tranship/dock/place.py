"""Where the payload of a dock can be had: on its own node as files to map, from elsewhere through a server."""

from __future__ import annotations

from dataclasses import dataclass

from tranship.dock.frames import node_of


@dataclass(frozen=True)
class Place:
    """node: names the memory that holds the slabs (see frames.node_of). folder: of the slabs; None where they are
    memory of the dock's own process. runs: the address of the server that sends runs of bytes; None if there is none.
    """

    node: str
    folder: str | None
    runs: str | None = None

    @staticmethod
    def of_folder(folder: str | None, runs: str | None = None, node: str | None = None) -> Place:
        """The place of a folder of this node."""
        return Place(node or node_of(folder or "/"), folder, runs)
