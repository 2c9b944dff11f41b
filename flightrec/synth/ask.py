"""Reads the faults that a user asks for: `never_issued:3`, `size_mismatch:1:2:0`."""

from __future__ import annotations

from collections.abc import Sequence

from flightrec.model import Kind
from flightrec.synth.job import Job
from flightrec.synth.world import HANGING, Fault
from ftcore.base.errors import BadSetting

MAKEABLE = (*HANGING, Kind.STRAGGLER)


def parse_faults(texts: Sequence[str], job: Job) -> tuple[Fault, ...]:
    """Return the faults. Raises BadSetting for a kind that cannot be made or a rank too high."""
    return tuple(_fault(text, job) for text in texts)


def _fault(text: str, job: Job) -> Fault:
    name, *numbers = text.split(":")
    kinds = {kind.value: kind for kind in MAKEABLE}
    if name not in kinds:
        raise BadSetting(f"--fault {text}: the kinds are {', '.join(kinds)}", fault=text)
    if not 1 <= len(numbers) <= 3 or not all(number.isdigit() for number in numbers):
        raise BadSetting(f"--fault {text} is not KIND:RANK[:STEP[:CALL]]", fault=text)
    rank, step, at = [int(number) for number in numbers] + [1, 0][len(numbers) - 1 :]
    if rank >= job.layout.world or step >= job.steps:
        what = f"the job has ranks 0 to {job.layout.world - 1} and steps 0 to {job.steps - 1}"
        raise BadSetting(f"--fault {text}: {what}", fault=text)
    return Fault(rank=rank, kind=kinds[name], step=step, at=at)
