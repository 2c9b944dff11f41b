"""Random made-up jobs and faults, by seed. Shared by the property test and the benchmark."""

import random

from flightrec.model import Kind
from flightrec.synth import Fault, Job, Layout
from flightrec.synth.world import HANGING, run


def random_job(rng):
    while True:
        layout = Layout(
            dp=rng.choice([1, 2, 3, 4]),
            tp=rng.choice([1, 2, 4]),
            pp=rng.choice([1, 1, 2, 4]),
            ep=rng.choice([1, 1, 2]),
        )
        if 3 <= layout.world <= 32:
            break
    return Job(
        layout=layout,
        steps=rng.randint(3, 6),
        layers=rng.randint(1, 3),
        microbatches=rng.randint(1, 4),
        buckets=rng.randint(1, 3),
        is_batched_p2p=rng.random() < 0.5,
        gathers=rng.random() < 0.3,
    )


def random_faults(rng, job):
    kinds = [k for k in HANGING if job.layout.pp > 1 or k is not Kind.P2P_NO_PARTNER]
    ranks = rng.sample(range(job.layout.world), 1 if rng.random() < 0.8 else 2)
    return [
        Fault(
            rank=rank,
            kind=rng.choice(kinds),
            step=rng.randint(1, job.steps - 1),
            at=rng.randint(0, 50),
        )
        for rank in ranks
    ]


def random_case(seed, *, healthy=False):
    """Job, faults that each alone make it hang, and how the recorder was set."""
    rng = random.Random(seed)
    while True:
        job = random_job(rng)
        faults = [] if healthy else random_faults(rng, job)
        run_ahead = rng.choice([0, 2, 8, 30])
        if all(run(job, [f], run_ahead=run_ahead, seed=seed).is_hanging for f in faults):
            break
    # Without timing the dumps of a stalled device do not differ from those of its peers.
    stall = any(fault.kind is Kind.DEVICE_STALL for fault in faults)
    options = {
        "run_ahead": run_ahead,
        "seed": seed,
        "ring": rng.choice([2000, 2000, 40]),
        "with_stacks": rng.random() < 0.7,
        "with_timing": stall or rng.random() < 0.5,
    }
    return job, faults, options, rng


def without_some(dumps, faults, rng):
    """The same dumps with one innocent rank's left out, where enough remain."""
    guilty = {fault.rank for fault in faults}
    innocent = sorted(set(dumps) - guilty)
    if len(dumps) < 4 or not innocent:
        return dumps
    lost = rng.choice(innocent)
    return {rank: dump for rank, dump in dumps.items() if rank != lost}
