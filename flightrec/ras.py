"""Reads what NCCL's RAS service says of each rank of each communicator: text, JSON, or live.

`ncclras` prints text or JSON (NCCL 2.24 and later). The JSON of 2.28 lacks a comma in the list of
missing ranks; it is put back. The live query speaks the service's line protocol on localhost.
"""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator

from flightrec.errors import BadEvidence
from flightrec.model import RasState

PORT = 28028  # NCCL_RAS_ADDR defaults to localhost:28028
ANSWER_BYTES_MAX = 64 << 20  # 1,024 ranks are about 0.6 MB of JSON
ASYNC_ERRORS = {
    1: "unhandled CUDA error",
    2: "system error",
    3: "internal error",
    4: "invalid argument",
    5: "invalid usage",
    6: "remote process error",
}

_HEADING = re.compile(r"^#\d+-\d+ \(([0-9a-f]+)\) (\w+)")
_MISSING = re.compile(r"^\s*The missing ranks?: ([\d, ]+)")
_RANK = re.compile(r"^\s*Rank (\d+)(.*)$")
_PROCESS = re.compile(r"managed by process (\d+) on node (\S+)")
_DEAD = re.compile(r"^\s*Process (\d+) on node (\S+) managing GPU")
_OPERATION = re.compile(r"different (\w+) operation counts")
_REACHED = re.compile(r"launched up to operation (\d+)")
_REPORTED = re.compile(r"reported (.+?)(?: -- |$)")
_LOST_COMMA = re.compile(r'([\d"}\]el])(\s*\n\s*")')


def looks_like_ras(text: str) -> bool:
    """Say whether `text` is an answer of the RAS service."""
    head = text[:4000]
    return (
        "SERVER PROTOCOL" in head
        or '"communicators_count"' in head
        or ("Job summary" in head and "Communicators..." in head)
    )


def read_ras(text: str, *, source: str = "") -> tuple[RasState, ...]:
    """Return one state per rank and communicator that the answer says something about."""
    start = text.find("{")
    if start >= 0 and '"communicators"' in text:
        return tuple(_from_json(_parse(text[start:], source)))
    return tuple(_from_text(text))


def query_ras(host: str = "localhost", port: int = PORT, *, timeout_s: float = 10.0) -> str:
    """Ask the RAS service of one process, which answers for the whole job. Raises OSError."""
    with socket.create_connection((host, port), timeout=timeout_s) as connection:
        connection.sendall(
            b"CLIENT PROTOCOL 2\nTIMEOUT %d\nSET FORMAT json\nVERBOSE STATUS\n"
            % max(1, int(timeout_s // 2))
        )
        answer = bytearray()
        while len(answer) < ANSWER_BYTES_MAX and (part := connection.recv(1 << 16)):
            answer += part
    return answer.decode(errors="replace")


def _parse(text: str, source: str) -> dict[str, object]:
    for candidate in (text, _LOST_COMMA.sub(r"\1,\2", text)):
        try:
            value = json.JSONDecoder().raw_decode(candidate)[0]
        except ValueError:
            continue
        if isinstance(value, dict):
            return value
    raise BadEvidence(f"{source or 'the RAS answer'} is cut off or not JSON", source=source)


def _from_json(answer: dict[str, object]) -> Iterator[RasState]:
    for communicator in _dicts(answer.get("communicators")):
        name = str(communicator.get("hash", "")).removeprefix("0x")
        present = _dicts(communicator.get("ranks"))
        missing = _dicts(communicator.get("missing_ranks"))
        members = tuple(sorted(_int(one.get("rank")) for one in present + missing))
        for one in present:
            status, counts = _dict(one.get("status")), _dict(one.get("collective_counts"))
            yield RasState(
                rank=_int(one.get("rank")),
                communicator=name,
                members=members,
                counts={key: _int(value) for key, value in sorted(counts.items())},
                error=ASYNC_ERRORS.get(_int(status.get("async_error")), ""),
            )
        for one in missing:
            dead = _dict(one.get("status")).get("considered_dead") is True
            yield RasState(
                rank=_int(one.get("rank")),
                communicator=name,
                members=members,
                is_missing=True,
                is_dead=dead,
            )


def _dicts(value: object) -> list[dict[str, object]]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def _dict(value: object) -> dict[str, object]:
    return value if isinstance(value, dict) else {}


def _int(value: object) -> int:
    return value if isinstance(value, int) else -1


def _from_text(text: str) -> Iterator[RasState]:
    """The text names only the ranks that stand out, in sections headed by communicator and error.

    Dead processes are listed by pid and node; the sections say which rank each of them is.
    """
    states: dict[tuple[str, int], RasState] = {}
    pids: dict[tuple[str, int], tuple[str, str]] = {}
    dead: set[tuple[str, str]] = set()
    name = section = operation = ""
    reached = -1
    for line in text.splitlines():
        if found := _HEADING.match(line):
            name, section, operation, reached = found[1], found[2], "", -1
        elif line.strip() == "DEAD":
            section = "DEAD"
        elif found := _OPERATION.search(line):
            operation = found[1]
        elif section == "DEAD" and (found := _DEAD.match(line)):
            dead.add((found[1], found[2]))
        elif found := _MISSING.match(line):
            for rank in found[1].split(","):
                key = name, int(rank)
                states[key] = RasState(rank=key[1], communicator=name, is_missing=True)
        else:
            if (at := _REACHED.search(line)) is not None:
                reached = int(at[1])
            if name and (found := _RANK.match(line)):
                key = name, int(found[1])
                states[key] = _named(states.get(key), key, section, operation, reached, line)
                if process := _PROCESS.search(line):
                    pids[key] = process[1], process[2]
    for key, state in sorted(states.items()):
        is_dead = pids.get(key) in dead
        yield (
            state
            if not is_dead
            else RasState(
                rank=state.rank, communicator=state.communicator, is_missing=True, is_dead=True
            )
        )


def _named(
    before: RasState | None, key: tuple[str, int], section: str, op: str, reached: int, line: str
) -> RasState:
    error = _REPORTED.search(line)
    counts = dict(before.counts) if before else {}
    if section == "MISMATCH" and reached >= 0:
        counts[op if op not in ("", "collective") else "all"] = reached
    return RasState(
        rank=key[1],
        communicator=key[0],
        is_missing=section == "INCOMPLETE" or (before is not None and before.is_missing),
        counts=counts,
        error=error[1] if error else (before.error if before else ""),
    )
