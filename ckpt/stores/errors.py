"""What a store can answer when it does not do what it was asked."""

from __future__ import annotations

from ftcore.base.errors import FtError


class StoreError(FtError):
    """The base of every error of a store. `facts` hold the key, the operation and the numbers."""

    remedy = "See the cause above; `ckpt verify URL` tells which steps are whole."


class ObjectMissing(StoreError):
    remedy = "List the store with `ckpt ls URL`: the step was never committed, or it was pruned."


class ObjectShort(StoreError):
    """An object ends before the bytes that were asked of it: truncated, or of another writer."""

    remedy = "The object is damaged. `ckpt verify URL` lists damaged steps; restore an older one."


class StoreUnavailable(StoreError):
    """No answer, a broken connection or a 5xx, also after every try."""

    remedy = (
        "The store or the way to it is down; saves go on with the other destinations. Test it "
        "with `ckpt bench URL`; raise tries_max or operation_timeout_s when it is only slow."
    )
    retryable = True


class StoreTimeout(StoreUnavailable):
    """The deadline of the operation passed. The store may have done it, or may still do it: a
    request that was given up can arrive late. So keys name their content or their writer."""


class StoreFull(StoreError):
    remedy = "Free space or raise the quota, or keep fewer steps (`keep_last`, `ckpt prune URL`)."


class StoreDenied(StoreError):
    remedy = "Check the credentials and the rights of this user on the path or bucket."
