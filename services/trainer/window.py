"""The order in which finished groups enter training: issue order, with a bounded look past what is not finished.

Taking whatever finished first would favour short answers; strict order would wait for the slowest. With a window of W the
trainer may take a group while fewer than W groups that are not dropped stand between the oldest unresolved issue and it
(that one included). So at most W - 1 later groups go before any group, which is what the staleness bound counts on, and a
drop never uses up the window, which is what keeps a window of dropped groups from hanging. W = 1 is strict issue order.

A group is resolved when it was taken or dropped; its first fate stands. Pure; `state` is plain data for the checkpoint. It
does not hold the waiting groups: they are not acknowledged, so the broker brings them again.
Properties in tests/trainer/test_window.py.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Window(Generic[T]):
    """Groups of type T, known by their issue number."""

    def __init__(self, size: int, head: int = 0) -> None:
        if size < 1:
            raise ValueError(f"window: {size}; it must be at least 1")
        self.size = size
        self.head = head
        """The oldest unresolved issue: everything before it was taken or dropped."""
        self._taken: set[int] = set()
        self._dropped: set[int] = set()
        self._waiting: dict[int, T] = {}

    @property
    def waiting(self) -> int:
        """Groups that have arrived and not been taken."""
        return len(self._waiting)

    def resolved(self, issue: int) -> bool:
        """Whether the group was taken or dropped."""
        return issue < self.head or issue in self._taken or issue in self._dropped

    def settled_below(self, issue: int) -> bool:
        """Whether every group with a lower issue number was taken or dropped, or waits here."""
        return all(self.resolved(number) or number in self._waiting for number in range(self.head, issue))

    def offer(self, issue: int, group: T) -> bool:
        """A group has arrived. False: it is resolved or here already, so this copy is to be acknowledged and forgotten."""
        if issue < 0:
            raise ValueError(f"issue {issue}: only groups for training have a place in the order")
        if self.resolved(issue) or issue in self._waiting:
            return False
        self._waiting[issue] = group
        return True

    def drop(self, issue: int) -> T | None:
        """A group will not be trained. Gives back the copy that was waiting, if any; dropping a resolved one does nothing."""
        if self.resolved(issue):
            return None
        self._dropped.add(issue)
        self._advance()
        return self._waiting.pop(issue, None)

    def take(self, limit: int | None = None) -> list[tuple[int, T]]:
        """The groups that may be trained now, in issue order, at most `limit`; they count as resolved from here on."""
        taken: list[tuple[int, T]] = []
        while (limit is None or len(taken) < limit) and (issue := self._next()) is not None:
            taken.append((issue, self._waiting.pop(issue)))
            self._taken.add(issue)
            self._advance()
        return taken

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold."""
        return {"size": self.size, "head": self.head, "taken": sorted(self._taken), "dropped": sorted(self._dropped)}

    @classmethod
    def restore(cls, state: dict[str, Any], size: int | None = None) -> Window[T]:
        """The window as it was; `size` may differ from the saved one."""
        window: Window[T] = cls(size or state["size"], state["head"])
        window._taken = set(state["taken"])
        window._dropped = set(state["dropped"])
        return window

    def _next(self) -> int | None:
        """The first waiting group inside the window."""
        before = 0
        issue = self.head
        last = max(self._waiting, default=-1)
        while before < self.size and issue <= last:
            if issue in self._waiting:
                return issue
            before += issue not in self._dropped
            issue += 1
        return None

    def _advance(self) -> None:
        while self.head in self._taken or self.head in self._dropped:
            self._taken.discard(self.head)
            self._dropped.discard(self.head)
            self.head += 1
