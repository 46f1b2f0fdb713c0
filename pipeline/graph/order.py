"""The nodes of a graph: in the order of their needs, and under names that tell them apart."""

from __future__ import annotations

import collections
from typing import Any, TypeVar

from pipeline.errors import InputError
from pipeline.graph.artifact import Artifact
from pipeline.graph.step import Node, as_node
from pipeline.identity import fingerprint

A = TypeVar("A", bound=Artifact)

_SHOWN_DIGITS = 6  # hex digits of the key that distinguish nodes of one label on a screen
_SHOWN_STEPS = 8  # steps of a cycle in its error message
_LABEL_LENGTH = 64


def named(artifact: A, name: str) -> A:
    """The same node under another display name, for graphs that call a step twice.

    The name is not part of the key.
    """
    node = as_node(artifact)
    if not is_display_name(name):
        raise InputError(
            f"named({node.label}, ...): expected 1 to {_LABEL_LENGTH} printable characters without "
            f"slashes, no '-' in front and no spaces around them, got {name!a:.300}"
        )
    node.label = name
    return artifact


def is_display_name(name: Any) -> bool:
    return (
        isinstance(name, str)
        and 0 < len(name) <= _LABEL_LENGTH
        and name.isprintable()
        and name == name.strip()
        and not name.startswith("-")
        and not {"/", "\\"} & set(name)
    )


def topological(targets: list[Node]) -> list[Node]:
    """Every node the targets need, inputs before users; nodes with equal keys appear once."""
    # Depth-first without recursion: a node is on the stack twice, and is added to the order when it
    # is popped the second time, after all of its inputs.
    order: dict[str, Node] = {}  # by key; equal nodes are one, with the labels of all
    names: dict[str, Node] = {}
    entered: dict[str, Node] = {}  # the path from a target; meeting one of these again is a cycle
    owners: dict[str, Node] = {}
    stack = [(node, False) for node in reversed(targets)]
    while stack:
        node, expanded = stack.pop()
        if expanded:
            order[node.key] = entered.pop(node.key)
            node.labels.add(node.label)
        elif node.key in entered:
            ring = list(entered)[list(entered).index(node.key) + 1 :]
            way = ", ".join(entered[key].label for key in ring[:_SHOWN_STEPS])
            way += f" and {len(ring) - _SHOWN_STEPS} more" if len(ring) > _SHOWN_STEPS else ""
            way = f", by way of {way}" if way else ""
            raise InputError(
                f"step {node.label!r} needs its own output{way}; a graph of steps cannot have a "
                "cycle"
            )
        elif node.key not in order:
            entered[node.key] = node
            _check_name(node, names.setdefault(node.step.name, node))
            owner = owners.setdefault(node.directory, node)
            if node.key != owner.key:
                raise InputError(
                    f"steps {owner.label!r} and {node.label!r} would both write to "
                    f"{node.directory}: their keys {owner.key} and {node.key} begin with the same "
                    "digits; change the version of one of them"
                )
            stack.append((node, True))
            stack.extend((child, False) for child in reversed(node.inputs.values()))
        else:
            _check_name(node, order[node.key])
            fingerprint.merge_classes((node.classes, order[node.key].classes), node.label)
            order[node.key].labels.add(node.label)
    fingerprint.merge_classes((node.classes for node in order.values()), "the graph")
    return list(order.values())


def _check_name(node: Node, owner: Node) -> None:
    mine, theirs = node.step.function, owner.step.function
    # A file that is executed twice declares its steps twice. Functions of the same code without a
    # closure are equal; with one, the captured values may differ.
    twice = _home(node) == _home(owner) and mine.__closure__ is None and theirs.__closure__ is None
    if mine is not theirs and not twice:
        raise InputError(
            f"two different steps are named {node.step.name!r}: {_home(owner)} and {_home(node)}; "
            'give one of them another name: @step(name="...")'
        )


def _home(node: Node) -> str:
    code = node.step.function.__code__
    return f"{node.step.function.__qualname__} ({code.co_filename}:{code.co_firstlineno})"


def unique_labels(nodes: list[Node]) -> dict[str, str]:
    """Label of every node by key; nodes that share a label get `@` and the start of their key."""
    labels = collections.Counter(node.label for node in nodes)
    ends = {n.key: f"@{n.key[:_SHOWN_DIGITS]}" if labels[n.label] > 1 else "" for n in nodes}
    found = {node.key: node.label + ends[node.key] for node in nodes}
    # Nodes that share the shortened key too are shown with the full key.
    shown = collections.Counter(found.values())
    return {k: v if shown[v] == 1 else f"{v.rpartition('@')[0]}@{k}" for k, v in found.items()}
