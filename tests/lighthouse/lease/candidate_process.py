"""A lighthouse reduced to its election, as a process: says on stdout what happens to it."""

import asyncio
import json
import signal
import sys
import time

from lighthouse.election import Election
from lighthouse.lease import LeaseLost, LeaseUnreachable, Timing, parse_lease


def say(what, **facts):
    print(json.dumps({"what": what, "at": time.monotonic(), **facts}), flush=True)


async def serve(tenure):
    """Write a growing number for as long as this process leads."""
    count = int(tenure.records.get("job", b"0"))
    say("leads", term=tenure.term, count=count)
    while True:
        try:
            await tenure.write("job", str(count + 1).encode())
        except LeaseLost:
            say("refused", term=tenure.term)
        except LeaseUnreachable:
            pass
        else:
            count += 1
            say("wrote", term=tenure.term, count=count, valid=tenure.is_valid())
        await asyncio.sleep(0.02)


async def main(lease_text, address):
    lease = parse_lease(lease_text, timing=Timing(ttl_s=2.0))
    election = Election(
        lease,
        address=address,
        serve=serve,
        on_change=lambda holder: say("holder", address=holder and holder.address),
    )
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, election.stop)
    say("started")
    try:
        await election.run()
    finally:
        await lease.close()
    say("ended")


asyncio.run(main(*sys.argv[1:]))
