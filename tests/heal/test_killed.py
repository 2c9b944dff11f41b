"""Sources and joiners that really die by SIGKILL, as processes of their own."""

import json
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from ftcore.heal import HealFailed, HealServer, Offer, heal
from tests.heal.states import bits, state, train_step

ROOT = Path(__file__).parents[2]
MEGABYTES = 16


@contextmanager
def process(role, *arguments):
    """A source or joiner process whose first line of output is there."""
    pipe = subprocess.PIPE
    command = [sys.executable, "-m", __name__, role, *arguments]
    child = subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True)
    try:
        child.first_line = child.stdout.readline()
        yield child
    finally:
        child.kill()
        child.wait()
        child.stdin.close()
        child.stdout.close()


def killer(child):
    """A progress callback that kills `child` once something has arrived."""

    def tell(progress):
        if progress.bytes_done:
            child.kill()

    return tell


def test_a_source_killed_in_mid_transfer_is_replaced():
    source, joiner = state(0, MEGABYTES, steps=1), state(1, MEGABYTES)
    with process("source") as child, HealServer(bandwidth_max=5e7) as server:
        offers = [
            Offer.from_json(json.loads(child.first_line)),
            server.publish(source, step=1, quorum_id=1),
        ]
        report = heal(offers, into=joiner, progress=killer(child))
    assert bits(joiner) == bits(source)
    assert report.sources[0].lost


def test_without_another_source_the_heal_fails_and_says_so():
    with process("source") as child:
        offer = Offer.from_json(json.loads(child.first_line))
        with pytest.raises(HealFailed, match="bytes arrived") as failure:
            heal(
                [offer],
                into=state(1, MEGABYTES),
                bandwidth_max=5e7,
                progress=killer(child),
            )
    assert failure.value.is_torn


def test_a_joiner_killed_in_mid_transfer_is_not_waited_for_and_the_next_one_heals():
    source, second = state(0, MEGABYTES, steps=1), state(2, MEGABYTES)
    with HealServer(stage_ahead=False) as server:
        offer = server.publish(source, step=1, quorum_id=1, readers=1)
        before = bits(source)
        with process("joiner", json.dumps(offer.to_json())) as child:
            assert child.first_line == "healing\n"
            child.kill()
            assert server.wait_served(timeout_s=60)
        server.gate()
        train_step(source["model"], source["optim"], 5)
        heal([offer], into=second)
    assert bits(second) == before


def main(role, *arguments):
    if role == "source":
        server = HealServer()
        offer = server.publish(state(0, MEGABYTES, steps=1), step=1, quorum_id=1)
        print(json.dumps(offer.to_json()), flush=True)
        sys.stdin.read()
    else:
        offer = Offer.from_json(json.loads(arguments[0]))
        told = []

        def tell(progress):
            if not told:
                told.append(True)
                print("healing", flush=True)

        heal([offer], into=state(1, MEGABYTES), bandwidth_max=1e7, progress=tell)


if __name__ == "__main__":
    main(*sys.argv[1:])
