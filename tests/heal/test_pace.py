"""Bandwidth limits: no source or joiner moves more bytes in a time than it may."""

import time

import pytest

from ftcore.heal import HealServer, heal
from tests.heal.states import bits, state

LIMIT = 4e7  # bytes a second: 16 MB of parameters and twice as much of Adam take 1.2 s
SLACK_BYTES = 8 << 20  # a connection may have a part under way before its first pause


@pytest.mark.parametrize("limited", ["source", "joiner"])
@pytest.mark.parametrize("connections", [1, 3])
def test_a_limit_holds_for_all_connections_together(limited, connections):
    source, joiner = state(0, 16, steps=1), state(1, 16)
    at_source, at_joiner = (LIMIT if limited == who else None for who in ("source", "joiner"))
    with HealServer(stage_ahead=False, bandwidth_max=at_source) as server:
        offer = server.publish(source, step=1, quorum_id=1)
        began = time.monotonic()
        report = heal([offer], into=joiner, connections=connections, bandwidth_max=at_joiner)
        seconds = time.monotonic() - began
    assert bits(joiner) == bits(source)
    moved = sum(s.bytes for s in report.sources)
    assert (moved - connections * SLACK_BYTES) / seconds < LIMIT
