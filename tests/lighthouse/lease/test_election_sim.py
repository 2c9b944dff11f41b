from dataclasses import dataclass

import pytest

from lighthouse.lease.api import Timing
from tests.lighthouse.lease.election_sim import Sim


@pytest.mark.parametrize("observed", [False, True], ids=["etcd-like", "watched"])
@pytest.mark.parametrize("block", range(10))
def test_never_two_leaders_and_terms_only_grow(block, observed):
    for seed in range(40 * block, 40 * block + 40):
        sim = Sim(seed, observed=observed)
        sim.run(60)
        assert sim.terms == sorted(set(sim.terms)), f"seed {seed}"
        assert sim.leaders == 1, f"seed {seed}: nobody ever led"


@pytest.mark.parametrize("observed", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_when_the_world_heals_somebody_leads_and_keeps_leading(seed, observed):
    sim = Sim(seed, observed=observed)
    sim.run(30)
    sim.faults = False
    sim.run(42)
    leaders = [p.name for p in sim.processes if p.leads()]
    assert len(leaders) == 1
    sim.run(60)
    assert [p.name for p in sim.processes if p.leads()] == leaders


@dataclass(frozen=True, slots=True, kw_only=True)
class Reckless(Timing):
    """What a leader without a safety margin would do."""

    def tenure_end(self, asked_at):
        return asked_at + self.ttl_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimist(Timing):
    """What a leader that counts from the reply instead of the request would do."""

    def tenure_end(self, asked_at):
        return asked_at + self.ttl_s * (1 - 2 * self.drift) + 2 * self.try_timeout_s


@pytest.mark.parametrize("timing", [Reckless(), Optimist()])
def test_the_simulator_catches_a_leader_that_stops_too_late(timing):
    with pytest.raises(AssertionError, match="lead at once"):
        for seed in range(200):
            Sim(seed, timing=timing).run(60)
