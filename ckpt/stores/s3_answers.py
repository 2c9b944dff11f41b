"""Decide what an S3 answer means: done, try again, renew credentials, give up and why."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass
from xml.etree import ElementTree

from ckpt.stores.errors import (
    ObjectMissing,
    StoreDenied,
    StoreError,
    StoreFull,
    StoreUnavailable,
)


class Meaning(enum.Enum):
    OK = "ok"
    MISSING = "missing"
    REFUSED = "refused"  # the condition of a conditional put does not hold
    NO_CONDITIONS = "no conditions"  # this store has no conditional puts
    EXPIRED = "expired"  # renew the credentials, then try again
    ELSEWHERE = "elsewhere"  # the bucket is in another region
    RETRY = "retry"
    DENIED = "denied"
    FULL = "full"
    WRONG = "wrong"


BY_CODE = {
    "NoSuchKey": Meaning.MISSING,
    "NoSuchUpload": Meaning.MISSING,
    "PreconditionFailed": Meaning.REFUSED,
    "ConditionalRequestConflict": Meaning.RETRY,
    "NotImplemented": Meaning.NO_CONDITIONS,
    "ExpiredToken": Meaning.EXPIRED,
    "ExpiredTokenException": Meaning.EXPIRED,
    "TokenRefreshRequired": Meaning.EXPIRED,
    "InvalidToken": Meaning.EXPIRED,
    "QuotaExceeded": Meaning.FULL,
    "StorageFull": Meaning.FULL,
    "XMinioStorageFull": Meaning.FULL,
    "SlowDown": Meaning.RETRY,
    "ServiceUnavailable": Meaning.RETRY,
    "InternalError": Meaning.RETRY,
    "RequestTimeout": Meaning.RETRY,
    "OperationAborted": Meaning.RETRY,
    "NoSuchBucket": Meaning.DENIED,
    "PermanentRedirect": Meaning.ELSEWHERE,
    "AuthorizationHeaderMalformed": Meaning.ELSEWHERE,
}
BY_STATUS = {
    404: Meaning.MISSING,
    408: Meaning.RETRY,
    409: Meaning.RETRY,
    412: Meaning.REFUSED,
    425: Meaning.RETRY,
    429: Meaning.RETRY,
    501: Meaning.NO_CONDITIONS,
    507: Meaning.FULL,
    301: Meaning.ELSEWHERE,
    307: Meaning.ELSEWHERE,
    401: Meaning.DENIED,
    403: Meaning.DENIED,
}
CLOCK = "Set the clock of this machine (the store compares it with its own)."
REMEDIES = {
    "RequestTimeTooSkewed": CLOCK,
    "NoSuchBucket": "Create the bucket, or correct its name.",
}


@dataclass(frozen=True, slots=True)
class Verdict:
    meaning: Meaning
    code: str
    message: str


def judge(status: int, body: bytes) -> Verdict:
    """What the answer means. A 200 may carry an error: CompleteMultipartUpload does that.

    >>> judge(503, b"<Error><Code>SlowDown</Code><Message>m</Message></Error>").meaning.value
    'retry'
    """
    code, message = _code(body), _tag(body, "Message")
    if 200 <= status < 300 and not code:
        return Verdict(Meaning.OK, "", "")
    meaning = BY_CODE.get(code) or BY_STATUS.get(status)
    if meaning is None:
        meaning = Meaning.RETRY if status >= 500 or status < 300 else Meaning.WRONG
    return Verdict(meaning, code or str(status), message)


def _code(body: bytes) -> str:
    return _tag(body, "Code") if b"<Error" in body[:512] else ""


def _tag(body: bytes, tag: str) -> str:
    found = re.search(rf"<{tag}>([^<]*)</{tag}>".encode(), body[:8192])
    return found.group(1).decode("utf-8", "replace") if found else ""


def as_error(verdict: Verdict, where: str, headers: Mapping[str, str]) -> StoreError:
    """The error to raise for an answer that is not OK."""
    what = f"{where} answered {verdict.code}" + (f": {verdict.message}" if verdict.message else "")
    match verdict.meaning:
        case Meaning.MISSING:
            return ObjectMissing(what, code=verdict.code)
        case Meaning.FULL:
            return StoreFull(what, code=verdict.code)
        case Meaning.RETRY | Meaning.EXPIRED | Meaning.ELSEWHERE:
            return StoreUnavailable(what, retry_after_s=_retry_after_s(headers), code=verdict.code)
        case Meaning.DENIED:
            return StoreDenied(what, remedy=REMEDIES.get(verdict.code), code=verdict.code)
        case _:
            return StoreError(what, remedy=REMEDIES.get(verdict.code), code=verdict.code)


def _retry_after_s(headers: Mapping[str, str]) -> float:
    asked = headers.get("retry-after", "")
    return min(float(asked), 60.0) if asked.isdigit() else 0.0


def records(body: bytes, tag: str) -> list[dict[str, str]]:
    """Every `<tag>` of a listing as its children's texts, whatever the namespace."""
    root = ElementTree.fromstring(body)
    return [
        {_local(child.tag): child.text or "" for child in node}
        for node in root.iter()
        if _local(node.tag) == tag
    ]


def field(body: bytes, tag: str) -> str:
    """The text of the first top-level `<tag>`, or an empty string."""
    for child in ElementTree.fromstring(body):
        if _local(child.tag) == tag:
            return child.text or ""
    return ""


def _local(tag: str) -> str:
    return tag.rpartition("}")[2]
