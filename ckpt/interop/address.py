"""`/runs/a/step-0000000007` names a step, `/runs/a` a directory of steps."""

from __future__ import annotations

import os

from ckpt.manifest import step_of


def split_address(where: str | os.PathLike[str]) -> tuple[str, int | None]:
    """The directory or URL of the run, and the step if the address ends with one.

    >>> split_address("s3://bucket/run/step-0000000007/")
    ('s3://bucket/run', 7)
    >>> split_address("/runs/a")
    ('/runs/a', None)
    """
    text = os.fspath(where).rstrip("/")
    root, _, last = text.rpartition("/")
    step = step_of(last)
    return (text, None) if step is None else (root, step)
