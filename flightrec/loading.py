"""Read dumps from wherever they are into Records: find, reduce in parallel, number alike."""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from flightrec.digest import MAGIC, SUFFIX, pack, unpack
from flightrec.dump import Dump
from flightrec.entries import read_entries
from flightrec.errors import BadDump, NoDumps
from flightrec.grouping import Grouping, unify
from flightrec.model import (
    Call,
    Columns,
    Entry,
    Problem,
    RankRecord,
    Records,
    Site,
)
from flightrec.sources import Source, find_sources, read_many
from flightrec.worker import Result, reduce_all, reduce_in_children

SMALL_BYTES = 2 << 20  # below this, starting a child costs more than it saves


def load_paths(
    paths: Sequence[str], *, quorum: int | None = None, processes: int | None = None
) -> Records:
    """Read all dumps that `paths` lead to. Raises NoDumps when there is not a single one."""
    found = find_sources(paths)
    digests = [source for source in found if is_digest(source)]
    ready = [result for source in digests for result in _results_of(source)]
    plain = [source for source in found if source not in digests]
    sources, problems = _of_one_quorum([*plain, *(source for source, _ in ready)], quorum)
    kept = set(sources)
    results = _reduced([source for source in plain if source in kept], processes)
    results += [result for result in ready if result[0] in kept]
    chosen, more = _one_for_each_rank(results)
    if not chosen:
        named = ", ".join(map(str, paths))
        raise NoDumps(f"no flight-recorder dump in {named}: {_why(more, len(sources))}")
    quorums = {source.quorum for source, _ in chosen.values() if source.quorum is not None}
    return _merged(chosen, tuple(problems + more), max(quorums, default=None))


def digest_of(paths: Sequence[str], *, processes: int | None = None) -> tuple[bytes, int]:
    """All that the verdict needs of the dumps in `paths`, and how many dumps that are. Raises
    NoDumps when there is not a single one."""
    results = sorted(_reduced(find_sources(paths), processes), key=lambda result: result[0])
    count = sum(isinstance(dump, Dump) for _, dump in results)
    if not count:
        raise NoDumps(f"no flight-recorder dump in {', '.join(map(str, paths))}")
    return pack(results), count


def is_digest(source: Source) -> bool:
    """By its first bytes, where they can be had cheaply; in archives and stores by its name."""
    if source.member or "://" in source.path:
        return (source.member or source.path).endswith(SUFFIX)
    try:
        with open(source.path, "rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def _results_of(digest: Source) -> list[Result]:
    for _, data in read_many([digest]):
        try:
            return [(digest, data)] if isinstance(data, BadDump) else unpack(data, str(digest))
        except BadDump as error:
            return [(digest, error)]
    return []


def _why(problems: Sequence[Problem], files: int) -> str:
    return f"{problems[0].source}: {problems[0].what}" if problems else f"{files} files looked at"


def _of_one_quorum(
    sources: Sequence[Source], quorum: int | None
) -> tuple[list[Source], list[Problem]]:
    """torchft writes one folder a quorum: keep the newest, or the one asked for."""
    known = sorted({s.quorum for s in sources if s.quorum is not None})
    if not known:
        return list(sources), []
    wanted = known[-1] if quorum is None else quorum
    if wanted not in known:
        raise NoDumps(f"no folder of quorum {wanted}; there are {known}", quorum=wanted)
    kept = [s for s in sources if s.quorum in (None, wanted)]
    older = [q for q in known if q != wanted]
    what = f"quorum {wanted} is read; also there: {', '.join(map(str, older))}"
    remedy = "Choose another one with --quorum."
    notes = [Problem(source="quorum folders", what=what, remedy=remedy)] if older else []
    return kept, notes


def _reduced(sources: Sequence[Source], processes: int | None) -> list[Result]:
    cpus = processes or len(os.sched_getaffinity(0))
    if cpus < 2 or sum(s.bytes_estimate for s in sources) < SMALL_BYTES:
        return list(reduce_all(sources))
    return reduce_in_children(_balanced(sources, min(cpus, len(sources), 16)))


def _balanced(sources: Sequence[Source], count: int) -> list[list[Source]]:
    """Split by bytes; what lies in one archive stays together, since it is read through once."""
    units: dict[str, list[Source]] = {}
    for source in sources:
        units.setdefault(source.path, []).append(source)
    parts: list[list[Source]] = [[] for _ in range(count)]
    loads = [0] * count
    for unit in sorted(units.values(), key=lambda u: (-sum(s.bytes_estimate for s in u), u)):
        lightest = loads.index(min(loads))
        parts[lightest].extend(unit)
        loads[lightest] += sum(s.bytes_estimate for s in unit) + 1
    return [part for part in parts if part]


def _one_for_each_rank(
    results: Sequence[Result],
) -> tuple[dict[int, tuple[Source, Dump]], list[Problem]]:
    """Keep one dump a rank, the one that ends latest; name what was left out, and why."""
    chosen: dict[int, tuple[Source, Dump]] = {}
    problems: list[Problem] = []
    for source, dump in sorted(results, key=lambda result: result[0]):
        if isinstance(dump, BadDump):
            problems.append(Problem(source=str(source), what=str(dump), remedy=dump.remedy))
            continue
        rank = _rank_of(source, dump)
        if dump.rank is None and rank is not None and source.rank not in (None, rank):
            problems.append(_misnamed(source, rank))
        if rank is None:
            problems.append(_rankless(source))
            continue
        problems += [Problem(source=str(source), what=what) for what in dump.problems]
        if rank in chosen:
            older, newer = sorted((chosen[rank], (source, dump)), key=_ends_at)
            problems.append(_duplicate(rank, older[0], newer[0]))
            chosen[rank] = newer
        else:
            chosen[rank] = (source, dump)
    return chosen, problems


def _ends_at(item: tuple[Source, Dump]) -> tuple[int, int, Source]:
    created = item[1].columns.created_ns
    with_stacks = sum(1 for site in item[1].sites if site)
    return (created[-1] if created else 0, with_stacks, item[0])


def _rank_of(source: Source, dump: Dump) -> int | None:
    """What the file says, then its name, unless its own sends and receives contradict the name."""
    named, shown = source.rank, dump.rank_hint
    if dump.rank is not None or named is None or shown is None:
        return dump.rank if dump.rank is not None else shown if named is None else named
    members = next((g.ranks for g in dump.groups if g.desc == "default_pg" and g.ranks), ())
    fits = not members or named % len(members) == shown  # torchft counts from 0 in each group
    return named if fits else shown


def _misnamed(source: Source, rank: int) -> Problem:
    what = f"the name says rank {source.rank}, but its sends and receives are those of rank {rank}"
    return Problem(source=str(source), what=what)


def _rankless(source: Source) -> Problem:
    what = "neither the name nor the content tells of which rank this dump is"
    return Problem(source=str(source), what=what, remedy="Name it …_rank_<number>.")


def _duplicate(rank: int, older: Source, newer: Source) -> Problem:
    what = f"a second dump of rank {rank}; {newer} ends later and is used"
    return Problem(source=str(older), what=what)


def _merged(
    chosen: Mapping[int, tuple[Source, Dump]], problems: tuple[Problem, ...], quorum: int | None
) -> Records:
    """Give groups, calls and sites one numbering, in rank order."""
    grouping = unify({rank: dump for rank, (_, dump) in chosen.items()})
    tables = _Tables()
    ranks = {rank: _record(rank, *chosen[rank], grouping, tables) for rank in sorted(chosen)}
    sources = {rank: source for rank, (source, _) in chosen.items()}
    return Records(
        ranks=ranks,
        groups=grouping.groups,
        calls=tuple(tables.calls),
        sites=tuple(tables.sites),
        problems=problems,
        quorum=quorum,
        reread=_Reread(sources, grouping),
    )


class _Tables:
    """What all ranks number alike, and columns, each once however many ranks have it."""

    def __init__(self) -> None:
        self.calls: dict[Call, int] = {}
        self.sites: dict[Site, int] = {}
        self._columns: dict[bytes, array[int]] = {}

    def one(self, column: array[int]) -> array[int]:
        key = hashlib.blake2b(column.tobytes(), key=column.typecode.encode()).digest()
        return self._columns.setdefault(key, column)


def _record(
    rank: int,
    source: Source,
    dump: Dump,
    grouping: Grouping,
    tables: _Tables,
) -> RankRecord:
    index_of, calls, sites = grouping.index_of[rank], tables.calls, tables.sites
    call_of = [calls.setdefault(call, len(calls)) for call in dump.calls]
    site_of = [sites.setdefault(site, len(sites)) for site in dump.sites]
    one = tables.one
    columns = replace(
        dump.columns,
        group=one(_renumbered(dump.columns.group, index_of)),
        seq=one(dump.columns.seq),
        p2p_seq=one(dump.columns.p2p_seq),
        call=one(_renumbered(dump.columns.call, call_of)),
        site=one(_renumbered(dump.columns.site, site_of)),
        flags=one(dump.columns.flags),
    )
    frontiers = {
        index_of[local]: group.frontier
        for local, group in enumerate(dump.groups)
        if group.frontier is not None
    }
    return RankRecord(
        rank=rank,
        source=str(source),
        version=dump.version,
        library=dump.library,
        columns=columns,
        frontiers=frontiers,
        configured=frozenset(index_of),
        first_record_id=dump.first_record_id,
        host=dump.host,
    )


def _renumbered(column: array[int], number_of: Sequence[int]) -> array[int]:
    if all(new == old for old, new in enumerate(number_of)):
        return column
    return array("I", map(number_of.__getitem__, column))


class _Reread:
    """Reads the whole entries of one rank again, for those who want to look at them."""

    def __init__(self, sources: Mapping[int, Source], grouping: Grouping) -> None:
        self._sources, self._grouping = sources, grouping

    def __call__(self, records: Records, rank: int) -> Iterator[Entry]:
        for _, data in read_many([self._sources[rank]]):
            if isinstance(data, bytes):
                return iter(read_entries(data, self._grouping.index_of[rank]))
        return iter(())


__all__ = ["Columns", "load_paths"]
