"""Who follows whom while a graph runs: when a step that reads a live input may start and must end.

A step is at work when it reports progress or a finished shard, so when it has what it runs on; or
when it waits for another run that does its work. Its followers may start then, and end when it ends
without an output.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pipeline.graph.node import Node

_AT_WORK = ("progress", "shard")


class Followers:
    """Bookkeeping of the executor's loop; knows nodes and events, starts and ends nothing.

    Args:
        users: the nodes that read each node, by key; those of one graph.
    """

    def __init__(self, users: Mapping[str, list[Node]]) -> None:
        self._users = users
        self._at_work: set[str] = set()
        self._told: set[str] = set()
        self._late: set[str] = set()

    def may_follow(self, node: Node, child: Node) -> bool:
        """Whether `node` may start although its live input `child` is not published."""
        return child.key in self._at_work and node.key not in self._late

    def hear(self, node: Node, event: str, *, begun: bool) -> Iterator[Node]:
        """Take note of an event of a running step; yields its followers when it is now at work.

        `begun`: an attempt of ours has begun, so that the event is not of one that was lost.
        """
        if node.key in self._at_work or not (event == "waiting" or (begun and event in _AT_WORK)):
            return
        self._at_work.add(node.key)
        yield from self._of(node)

    def settled(self, node: Node) -> bool:
        """Take note that a step ended; whether it was told to."""
        self._at_work.discard(node.key)
        told = node.key in self._told
        self._told.discard(node.key)
        return told

    def without(self, node: Node, running: Mapping[str, Node]) -> Iterator[Node]:
        """The running followers of a step that ended without an output, which are to end too."""
        for follower in self._of(node):
            if follower.key in running and follower.key not in self._told:
                self._told.add(follower.key)
                yield follower

    def wait(self, node: Node) -> None:
        """There is no room beside what it follows: let it start after that only."""
        self._late.add(node.key)

    def _of(self, node: Node) -> Iterator[Node]:
        for user in self._users.get(node.key, ()):
            if any(user.inputs[name].key == node.key for name in user.live):
                yield user
