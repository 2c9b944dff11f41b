"""Our lighthouse beside torchft's, in one run: `python -m tests.bench.lighthouse [WHAT] [--quick]`.

WHAT is `small` (2, 16 and 64 groups), `large` (256 and 1,024), `churn` or `steady`: each takes less
than three minutes. Without it, all of them.

Asks: N groups on N connections ask together; from the last ask to the reply, all replies of all
rounds. The load comes from one Python process (grpc.aio) in every row, so its own time is in all of
them alike. Prints a table and one JSON line.
"""

import argparse
import asyncio
import json
import statistics
import time
import urllib.request

from tests.bench.lighthouse import load
from tests.bench.lighthouse.servers import ours, torchft


def spread(rounds):
    values = sorted(v * 1000 for r in rounds[1:] for v in r)
    return {"p50_ms": statistics.median(values), "p99_ms": values[int(0.99 * (len(values) - 1))]}


def asks(count, rounds):
    with torchft(count) as server:
        before, results = (
            server.cpu_s(),
            asyncio.run(load.torchft_rounds(server.address, count, rounds)),
        )
        rows = {"torchft": spread(results) | costs(server, before, rounds)}
    with ours(count) as server:
        before, results = (
            server.cpu_s(),
            asyncio.run(load.torchft_rounds(server.address, count, rounds)),
        )
        rows["ours, torchft's protocol"] = spread(results) | costs(server, before, rounds)
    with ours(count) as server:
        before = server.cpu_s()
        results, reply_bytes = asyncio.run(load.our_rounds(server.address, count, rounds))
        rows["ours"] = (
            spread(results) | costs(server, before, rounds) | {"reply_bytes": reply_bytes}
        )
    return rows


def costs(server, cpu_before, rounds):
    return {
        "cpu_ms_a_round": (server.cpu_s() - cpu_before) / rounds * 1000,
        "rss_mb": server.rss_mb(),
    }


def churn(count):
    """`count` ids come and go, then a quorum of 16 groups, on torchft's protocol for both."""
    rows = {}
    for name, serve in (("torchft", torchft), ("ours", short_lived)):
        with serve(16) as server:
            fresh = spread(asyncio.run(load.torchft_rounds(server.address, 16, 20)))
            names = (f"gone-{i}:0123456789abcdef" for i in range(count))
            started = time.perf_counter()
            asyncio.run(load.torchft_heartbeats(server.address, names))
            took_s = time.perf_counter() - started
            time.sleep(6)  # the heartbeat time-out of both is 5 s
            after = spread(asyncio.run(load.torchft_rounds(server.address, 16, 20)))
            with urllib.request.urlopen(f"http://{server.address}/status", timeout=60) as answer:
                page = len(answer.read())
            rows[name] = {
                "p50_fresh_ms": fresh["p50_ms"],
                "p50_after_ms": after["p50_ms"],
                "page_bytes": page,
                "rss_mb": server.rss_mb(),
                "heartbeats_a_second": count / took_s,
            }
    return rows


def short_lived(replicas_min):
    return ours(replicas_min)


def steady(count, seconds):
    async def run(server):
        async with load.standing(server.address, count):
            await asyncio.sleep(2)
            before, started = server.cpu_s(), time.perf_counter()
            await asyncio.sleep(seconds)
            share = (server.cpu_s() - before) / (time.perf_counter() - started)
            return {"cpu_of_a_core": share, "rss_mb": server.rss_mb()}

    with ours(count) as server:
        return {"ours": asyncio.run(run(server))}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("what", nargs="?", choices=["small", "large", "churn", "steady"])
    options = parser.parse_args()
    results = {}
    counts = {"small": (2, 16, 64), "large": (256, 1024), None: (2, 16, 64, 256, 1024)}
    for count in counts.get(options.what, ()):
        if count < 256 or not options.quick:
            results[f"asks {count}"] = asks(count, 50 if count < 64 else 20 if count < 256 else 6)
            show(f"asks {count}", results)
    if options.what in (None, "churn"):
        results["churn"] = churn(5_000 if options.quick else 100_000)
        show("churn", results)
    if options.what in (None, "steady"):
        results["steady 1024"] = steady(64 if options.quick else 1024, 5 if options.quick else 15)
        show("steady 1024", results)
    print(json.dumps(results))


def show(name, results):
    for who, row in results[name].items():
        values = ", ".join(f"{k} {v:.4g}" for k, v in row.items())
        print(f"{name:12} {who:26} {values}", flush=True)


if __name__ == "__main__":
    main()
