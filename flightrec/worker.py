"""Reduce dumps in child processes: sources go in, columns come out, as plain data over pipes.

A child is `python -m flightrec.worker`, started afresh, so that it works from a manager full of
threads and from a script without a main guard, and a file that kills a reader kills only a child.
"""

from __future__ import annotations

import marshal
import subprocess
import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, fields
from typing import IO, Any

from flightrec.dump import Dump, LocalGroup, read_dump
from flightrec.errors import BadDump
from flightrec.model import Call, Columns, Frame, Frontier
from flightrec.sources import Source, read_many

Result = tuple[Source, Dump | BadDump]


def reduce_all(sources: Iterable[Source]) -> Iterator[Result]:
    """Read and reduce each source, here and now."""
    for source, data in read_many(list(sources)):
        yield source, data if isinstance(data, BadDump) else _reduced(data)


def _reduced(data: bytes) -> Dump | BadDump:
    try:
        return read_dump(data)
    except BadDump as error:
        return error


def reduce_in_children(parts: Sequence[Sequence[Source]]) -> list[Result]:
    """Like `reduce_all`, one child for each part, all at a time."""
    with ThreadPoolExecutor(max_workers=len(parts)) as threads:
        return [result for results in threads.map(_run_child, parts) for result in results]


def _run_child(sources: Sequence[Source]) -> list[Result]:
    by_index = list(sources)
    command = [sys.executable, "-m", "flightrec.worker"]
    results: list[Result] = []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin and child.stdout
        child.stdin.write(marshal.dumps([astuple(source) for source in by_index]))
        child.stdin.close()
        seen = set()
        for index, body in _frames(child.stdout):
            seen.add(index)
            results.append((by_index[index], _decoded(body)))
    for index, source in enumerate(by_index):
        if index not in seen:
            why = f"the reader of {source} ended with code {child.returncode}"
            results.append((source, BadDump(why)))
    return results


def _frames(pipe: IO[bytes]) -> Iterator[tuple[int, object]]:
    while header := pipe.read(8):
        size = int.from_bytes(header, "little")
        body = pipe.read(size)
        if len(body) < size:
            return
        yield marshal.loads(body)


def _main() -> None:
    sources = [Source(*row) for row in marshal.loads(sys.stdin.buffer.read())]
    index_of = {source: index for index, source in enumerate(sources)}
    for source, result in reduce_all(sources):
        body = marshal.dumps((index_of[source], _encoded(result)))
        sys.stdout.buffer.write(len(body).to_bytes(8, "little") + body)
    sys.stdout.buffer.flush()


def _encoded(result: Dump | BadDump) -> Any:
    if isinstance(result, BadDump):
        return str(result)
    columns = [getattr(result.columns, column.name) for column in fields(Columns)]
    return (
        result.version,
        result.library,
        result.rank,
        result.rank_hint,
        [astuple(group) for group in result.groups],
        [astuple(call) for call in result.calls],
        [astuple(frame) for site in result.sites for frame in site],
        [len(site) for site in result.sites],
        [(column.typecode, column.tobytes()) for column in columns],
        result.first_record_id,
        result.problems,
        result.host,
    )


def _decoded(body: object) -> Dump | BadDump:
    if isinstance(body, str):
        return BadDump(body)
    assert isinstance(body, tuple)
    version, library, rank, rank_hint, groups, calls, frames, lengths, columns, *rest = body
    first, problems, host = rest
    every_frame = iter([Frame(name=n, filename=f, line=line) for n, f, line in frames])
    arrays = [array(typecode, raw) for typecode, raw in columns]
    return Dump(
        version=version,
        library=library,
        rank=rank,
        rank_hint=rank_hint,
        groups=tuple(map(_local_group, groups)),
        calls=tuple(_call(row) for row in calls),
        sites=tuple(tuple(next(every_frame) for _ in range(length)) for length in lengths),
        columns=Columns(**dict(zip((c.name for c in fields(Columns)), arrays, strict=True))),
        first_record_id=first,
        problems=tuple(problems),
        host=host,
    )


def _call(row: tuple[object, ...]) -> Call:
    return Call(**dict(zip((f.name for f in fields(Call)), row, strict=True)))  # type: ignore[arg-type]


def _local_group(row: Sequence[object]) -> LocalGroup:
    pg_id, name, desc, ranks, frontier, is_global = row
    values = {"pg_id": pg_id, "name": name, "desc": desc, "ranks": ranks, "is_global": is_global}
    if isinstance(frontier, tuple):
        enqueued, started, completed, _work = frontier
        values["frontier"] = Frontier(
            last_enqueued=enqueued, last_started=started, last_completed=completed
        )
    return LocalGroup(**values)  # type: ignore[arg-type]


if __name__ == "__main__":
    _main()
