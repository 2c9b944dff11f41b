"""What can go wrong with a checkpoint, each with what to do about it."""

from __future__ import annotations

from ftcore.base.errors import FtError


class CheckpointError(FtError):
    """Base of all errors of this package."""

    remedy = "Run `ckpt ls URL` to see which steps are complete."


class ManifestMissing(CheckpointError):
    remedy = (
        "This step was never committed: its upload failed or is still running. Restore an earlier "
        "step (`ckpt ls URL`), or remove the leftovers with `ckpt prune URL`."
    )


class Corrupt(CheckpointError):
    """Bytes in a store are not the bytes that were committed."""

    remedy = (
        "The store returned other bytes than were committed. Restore an earlier step (`ckpt ls "
        "URL`), run `ckpt verify --deep URL` to see what else is damaged, and check the disk."
    )


class FormatTooNew(CheckpointError):
    remedy = "Install the version of ftcore that wrote this checkpoint, or a later one."


class StateMismatch(CheckpointError):
    """The checkpoint and the state to fill do not have the same names, shapes or types."""

    remedy = (
        "Nothing was changed. Pass strict=False, `only=` a prefix or a predicate to load what "
        "matches, or build the model that was saved (`ckpt show URL` lists its names)."
    )


class NoCheckpoint(CheckpointError):
    remedy = "Check the address and the step; `ckpt ls URL` lists what is there."


class StagingTorn(CheckpointError):
    """A tensor changed while it was being copied, so the save was dropped."""

    remedy = (
        "Something wrote to the state before handle.wait_staged() returned. Optimizers wait by "
        "themselves; anything else that writes in place must call wait_staged() first."
    )


class SaveSkipped(CheckpointError):
    """The policy for slow uploads dropped this save."""

    remedy = "Save less often, allow more staging slots, or use when_busy='wait'."


class SaveFailed(CheckpointError):
    """A save did not become durable. Later saves are not affected."""

    remedy = "The cause is named above. The next save starts afresh; earlier steps are untouched."
    retryable = True


class Fenced(CheckpointError):
    """Another trainer took over the directory."""

    remedy = "Stop one of the two trainers, or give each a directory of its own."


class DaemonGone(CheckpointError):
    remedy = (
        "The upload daemon died and could not be started again. Its log is named above; "
        "`ckpt daemon` in a terminal shows why it does not start."
    )
    retryable = True


class IncompleteSave(CheckpointError):
    """Not every participant's shard arrived, so the step was not committed."""

    remedy = "Restore the newest complete step. A participant died before its state was staged."


class StateTooLarge(CheckpointError):
    remedy = "Raise staging_bytes_max or free memory; it must hold at least two files of a save."
