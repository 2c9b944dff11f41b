"""What can be wrong with a state: a type, a layout, an encoding, a moment."""

from __future__ import annotations

from ftcore.base.errors import FtError


class CannotStore(FtError):
    """A value of the state has a type that has no encoding."""

    remedy = (
        "Turn the value named above into numbers, strings, lists, dicts or tensors in "
        "`state_dict()`, or teach its type with `ftcore.statedict.register_type`."
    )


class PlainEncodingInvalid(FtError):
    """Bytes that should hold plain values do not: damaged, hostile, or of a newer version."""

    remedy = (
        "Check that both sides run the same version of ftcore and have registered the same types; "
        "if they do, the bytes were damaged on their way."
    )


class LayoutDiffers(FtError):
    """Two states that should have the same tensors do not."""

    remedy = "Start all replica groups with the same model, optimizer and parallelism settings."


class NotAtStepBoundary(FtError):
    """The state was read while a step was running."""

    remedy = (
        "Export the state on the training thread, after the optimizer step of one step and "
        "before the next."
    )
