"""Errors of the analyzer, each with its remedy."""

from __future__ import annotations

from ftcore.base.errors import FtError


class NoDumps(FtError):
    """Nothing that was named holds a readable dump."""

    remedy = (
        "Name the files, folder or archive into which the ranks dumped "
        "(TORCH_FR_DUMP_TEMP_FILE, default ~/.cache/torch/comm_lib_trace_rank_*)."
    )


class BadDump(FtError):
    """One file is not a flight-recorder dump, or is torn, or is hostile."""

    remedy = "Leave the file out, or dump again; the other ranks' files are still used."


class BadEvidence(FtError):
    """A log, a RAS answer, a stack or a list of exit codes cannot be read."""

    remedy = "Give the file as the tool printed it, or leave it out: evidence is optional."


class NoSuchRank(FtError):
    """A rank was asked for of which there is no dump."""

    remedy = "Ask for one of the ranks named above, or add its dump to the paths."


class NoPipes(FtError):
    """Nobody listens for dump requests."""

    remedy = (
        "Set TORCH_NCCL_DEBUG_INFO_PIPE_FILE to this prefix before training (NCCL), or wrap the "
        "training loop in flightrec.dump_on_request(prefix, rank) (any backend)."
    )
