"""Find where all waiting ends: ranks, calls and circles of the graph that lead nowhere else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from flightrec.waits import Key, Waits

Node = int | Key  # a rank, or a call at which ranks stand


@dataclass(frozen=True, slots=True)
class Sink:
    """One end of all waiting: a single rank, a single call, or a circle of both."""

    ranks: tuple[int, ...]
    keys: tuple[Key, ...]


def sinks(waits: Waits) -> list[Sink]:
    """The strongly connected parts of the graph that no edge leaves (Tarjan 1972), in order."""
    parts = _parts(waits)
    part_of = {node: i for i, part in enumerate(parts) for node in part}
    found = []
    for i, part in enumerate(parts):
        if all(part_of[after] == i for node in part for after in _after(node, waits)):
            ranks = sorted(node for node in part if isinstance(node, int))
            keys = sorted(node for node in part if isinstance(node, Key))
            found.append(Sink(tuple(ranks), tuple(keys)))
    return sorted(found, key=lambda sink: (sink.ranks, sink.keys))


def _after(node: Node, waits: Waits) -> Iterator[Node]:
    if isinstance(node, Key):
        yield from (lack.rank for lack in waits.lacks[node])
    elif node in waits.blocked:
        yield waits.key(node)


def _parts(waits: Waits) -> list[list[Node]]:
    """Tarjan's algorithm without recursion."""
    index: dict[Node, int] = {}
    low: dict[Node, int] = {}
    on_stack: set[Node] = set()
    stack: list[Node] = []
    parts: list[list[Node]] = []
    for start in sorted(waits.blocked):
        if start in index:
            continue
        work: list[tuple[Node, Iterator[Node]]] = [(start, _after(start, waits))]
        index[start] = low[start] = len(index)
        stack.append(start)
        on_stack.add(start)
        while work:
            node, todo = work[-1]
            after = next(todo, None)
            if after is None:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    cut = stack.index(node)
                    parts.append(stack[cut:])
                    on_stack.difference_update(stack[cut:])
                    del stack[cut:]
            elif after not in index:
                index[after] = low[after] = len(index)
                stack.append(after)
                on_stack.add(after)
                work.append((after, _after(after, waits)))
            elif after in on_stack:
                low[node] = min(low[node], index[after])
    return parts
