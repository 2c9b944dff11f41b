"""What stores decide without touching anything: which reads go together, what an answer means."""

import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.stores import coalesce as coalescing
from ckpt.stores import parts, s3_answers
from ckpt.stores.coalesce import Read, coalesce
from ckpt.stores.errors import StoreDenied, StoreTimeout, StoreUnavailable
from ckpt.stores.s3_answers import Meaning, as_error, field, judge, records
from ckpt.stores.tries import Deadline, with_tries

DATA = bytes(range(256)) * 4


@pytest.mark.parametrize("module", [coalescing, parts, s3_answers])
def test_the_examples_in_the_documentation_hold(module):
    assert doctest.testmod(module).failed == 0


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 900), st.integers(0, 120))),
    st.integers(1, 200),
    st.integers(0, 50),
)
def test_coalesced_requests_fill_every_read_and_none_is_larger_than_a_part(rows, part, gap):
    targets = [(key, at, bytearray(size)) for key, at, size in rows]
    reads = [Read(key=k, offset=at, into=memoryview(t)) for k, at, t in targets]
    for batch in coalesce(reads, part_bytes=part, gap_bytes_max=gap):
        assert batch.size_bytes <= part + gap
        at = batch.offset
        for into in batch.into:
            into[:] = DATA[at : at + len(into)]
            at += len(into)
    assert all(t == DATA[at : at + len(t)] for _, at, t in targets)


def test_twenty_thousand_neighbours_are_a_few_requests():
    memory = memoryview(bytearray(20_000 * 64))
    reads = [Read(key="k", offset=i * 64, into=memory[i * 64 : i * 64 + 64]) for i in range(20_000)]
    assert len(coalesce(reads, part_bytes=16 << 20, gap_bytes_max=0)) <= 21


@pytest.mark.parametrize(
    ("status", "code", "meaning"),
    [
        (200, "", Meaning.OK),
        (206, "", Meaning.OK),
        (200, "InternalError", Meaning.RETRY),  # CompleteMultipartUpload answers so
        (404, "NoSuchKey", Meaning.MISSING),
        (404, "NoSuchBucket", Meaning.DENIED),
        (404, "", Meaning.MISSING),
        (412, "PreconditionFailed", Meaning.REFUSED),
        (412, "", Meaning.REFUSED),
        (409, "ConditionalRequestConflict", Meaning.RETRY),
        (501, "NotImplemented", Meaning.NO_CONDITIONS),
        (503, "SlowDown", Meaning.RETRY),
        (500, "", Meaning.RETRY),
        (403, "AccessDenied", Meaning.DENIED),
        (403, "QuotaExceeded", Meaning.FULL),
        (400, "ExpiredToken", Meaning.EXPIRED),
        (301, "PermanentRedirect", Meaning.ELSEWHERE),
        (400, "InvalidArgument", Meaning.WRONG),
    ],
)
def test_every_answer_has_a_meaning(status, code, meaning):
    body = f"<Error><Code>{code}</Code></Error>".encode() if code else b""
    assert judge(status, body).meaning is meaning


def test_a_skewed_clock_is_named_as_the_cause():
    body = b"<Error><Code>RequestTimeTooSkewed</Code><Message>m</Message></Error>"
    error = as_error(judge(403, body), "s3://b", {})
    assert isinstance(error, StoreDenied) and "clock" in error.remedy


def test_listings_are_read_whatever_their_namespace():
    row = b"<Contents><Key>a&amp;b</Key><Size>3</Size></Contents>"
    start = b'<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
    body = start + b"<IsTruncated>false</IsTruncated>" + row + b"</ListBucketResult>"
    assert records(body, "Contents") == [{"Key": "a&b", "Size": "3"}]
    assert field(body, "IsTruncated") == "false"


class Tries:
    """A request that fails some times, and the waits between."""

    def __init__(self, *errors):
        self.errors, self.waits, self.calls = list(errors), [], 0

    def __call__(self, deadline):
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return "done"

    def run(self, tries_max=5, seconds=1000.0):
        return with_tries(
            self,
            what="put a",
            tries_max=tries_max,
            deadline=Deadline.after(seconds),
            request_timeout_s=10,
            sleep=self.waits.append,
        )


def test_what_may_work_later_is_tried_again_with_growing_waits():
    tries = Tries(*[StoreUnavailable("503")] * 4)
    assert tries.run() == "done"
    assert tries.calls == 5 and tries.waits[3] > tries.waits[0] > 0


def test_a_store_that_says_how_long_to_wait_is_obeyed():
    tries = Tries(StoreUnavailable("503", retry_after_s=7.0))
    tries.run()
    assert tries.waits[0] == 7.0


def test_what_can_never_work_is_not_tried_again():
    tries = Tries(StoreDenied("403"))
    with pytest.raises(StoreDenied, match="put a: 403"):
        tries.run()
    assert tries.calls == 1


def test_no_wait_goes_beyond_the_deadline():
    tries = Tries(StoreUnavailable("503", retry_after_s=60.0))
    with pytest.raises(StoreUnavailable):
        tries.run(seconds=5.0)
    assert tries.waits == []


def test_a_deadline_that_has_passed_is_an_error():
    with pytest.raises(StoreTimeout, match="deadline of upload"):
        Deadline.after(-1, "upload").left_s()
