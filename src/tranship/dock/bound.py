"""The versions of a group's tokens, and what the bound on staleness allows them to be."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from tranship.dock.group import Group
from tranship.dock.messages import Publish
from tranship.dock.window import Unfinished, Window
from tranship.types import RunError


class Bound:
    """Keeps a window's deadlines in step with the groups' versions. Validation groups have no deadline.

    tell: called with a group whose versions have changed.
    """

    def __init__(self, window: Window, tell: Callable[[Group], None]) -> None:
        self._window = window
        self._tell = tell

    def __str__(self) -> str:
        return f"staleness bound {self._window.staleness}, next batch of version {self._window.base}"

    def deadline(self, group: Group) -> int | None:
        """The last version at which a training group may be trained on; None before it is started."""
        oldest = group.oldest_version
        return None if oldest is None or group.kind != "train" else oldest + self._window.staleness

    def set_versions(self, group: Group, declared: int | None, published: int | None) -> None:
        """A group's tokens are of other versions than was known."""
        old = self.deadline(group)
        group.declared, group.published = declared, published
        if group.kind == "train" and not group.in_batch and group.here:
            self._window.move(group.group_id, old, self.deadline(group))
        self._tell(group)

    def may_declare(self, group: Group, version: int, *, instead: bool = False) -> bool:
        """Whether a group may hold tokens of a version besides (or `instead` of) those that it was declared to have."""
        if group.kind != "train":
            return True
        known = group.published if instead else group.oldest_version
        oldest = version if known is None else min(version, known)
        old, new = self.deadline(group), oldest + self._window.staleness
        return old == new or self._window.may_start(group.group_id, old, new)

    def check_sampler_version(self, version: int | None) -> None:
        """ValueError for weights that do not exist. Those of the next version may be in use just before `advance`."""
        newest = self._window.newest_version
        if version is not None and version > newest:
            raise ValueError(f"a sampler is at version {version}, and the newest one is {newest}")

    def sampled_version(self, group: Group, publish: Publish) -> int | None:
        """The oldest version of the tokens that a message brings for a group; None if it brings none."""
        if group.kind != "train":
            return None
        if publish.sampled_version is not None:
            self.check_sampler_version(publish.sampled_version)
            return publish.sampled_version
        return group.declared if publish.lease is not None and publish.lease == group.start_lease else None

    def unfinished(self, groups: Iterable[Group]) -> Iterator[Unfinished]:
        """Those of the groups that were started and cannot be trained on yet."""
        for group in groups:
            deadline = self.deadline(group)
            if deadline is not None and not group.in_batch and not self._window.is_resolved(group.group_id):
                yield Unfinished(group.group_id, deadline)

    def check_age(self, group: Group) -> None:
        """RunError if a group that is taken to be trained on is older than the bound, which only a bug can cause."""
        oldest, version = group.oldest_version, self._window.version
        if oldest is not None and not 0 <= version - oldest <= self._window.staleness:
            raise RunError(
                f"group {group.group_id} has tokens of version {oldest}, and the batch is of version {version}: "
                f"the staleness bound is {self._window.staleness}"
            )
