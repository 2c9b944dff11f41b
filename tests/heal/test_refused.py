"""What a source or a joiner refuses, each in one sentence and before anything is written."""

import socket

import pytest

from ftcore.heal import HealServer, Offer, OfferRefused, SourceLost, heal
from ftcore.heal.errors import FrameInvalid
from ftcore.heal.receiver import ask, connect
from ftcore.statedict import LayoutDiffers
from tests.heal.states import bits, state


@pytest.fixture
def server():
    with HealServer(stage_ahead=False) as server:
        yield server


def test_a_wrong_layout_is_refused_by_name_before_anything_is_written(server):
    joiner = state(1, megabytes=2)
    before = bits(joiner["model"])
    offer = server.publish(state(0, megabytes=1, steps=1), step=1, quorum_id=1)
    with pytest.raises(LayoutDiffers, match=r"this group has model\.layers\.1\.weight"):
        heal([offer], into=joiner)
    assert bits(joiner["model"]) == before


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"quorum_id": 3}, "step 1 of quorum 3 is asked for, step 1 of quorum 4 is served"),
        ({"step": 9}, "step 9 of quorum 4 is asked for"),
        ({"token": "guessed"}, "the token is not that of this source"),
    ],
)
def test_a_stale_or_foreign_reader_is_refused(server, change, sentence):
    offer = server.publish(state(0), step=1, quorum_id=4)
    with pytest.raises(OfferRefused, match=sentence):
        heal([Offer.from_json(offer.to_json() | change)], into=state(1))


def test_a_retired_offer_is_refused(server):
    offer = server.publish(state(0), step=1, quorum_id=4)
    server.retire()
    with pytest.raises(OfferRefused, match="no longer served"):
        heal([offer], into=state(1))


def test_garbage_on_the_port_is_survived(server):

    offer = server.publish(state(0), step=1, quorum_id=1)
    host, _, port = offer.address.rpartition(":")
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, b"\x00\x00\x00\x02[]", b""):
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(garbage)
    heal([offer], into=state(1))


def test_requests_for_what_is_not_there_end_the_connection(server):

    offer = server.publish(state(0, steps=1), step=1, quorum_id=1)
    for request in (
        {"want": "part", "part": 99, "have": "0"},
        {"want": "part", "part": "0", "have": "0"},
        {"want": "part", "part": 0, "have": "f" * 9000},
        {"want": "part", "part": 0, "have": "zz"},
        {"want": "everything"},
        {},
    ):
        with connect(offer, reader="r", silent_s=5) as connection, pytest.raises(SourceLost):
            ask(connection, request)


def test_an_offer_from_outside_is_validated():
    with pytest.raises(FrameInvalid):
        Offer.from_json({"address": "x:1", "token": "t", "step": "1"})
