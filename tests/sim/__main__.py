"""Run many seeds (`python -m tests.sim --seeds 5000`) or replay one (`--seed 7`)."""

from __future__ import annotations

import multiprocessing
import time
import traceback

import click

from tests.sim.world import run_seed


def outcome(seed: int) -> tuple[int, dict[str, int], str]:
    try:
        return seed, run_seed(seed).counts, ""
    except AssertionError:
        return seed, {}, traceback.format_exc(limit=-3)


@click.command()
@click.option("--seed", type=int, help="Replay this one seed.")
@click.option("--seeds", default=1000, help="How many seeds, starting at --first.")
@click.option("--first", default=0)
@click.option("--processes", default=2)
def main(seed: int | None, seeds: int, first: int, processes: int) -> None:
    if seed is not None:
        click.echo(run_seed(seed, is_traced=True).counts)
        return
    began = time.perf_counter()
    totals: dict[str, int] = {}
    failed = []
    with multiprocessing.Pool(processes) as pool:
        for number, counts, error in pool.imap_unordered(outcome, range(first, first + seeds), 10):
            for name, count in counts.items():
                totals[name] = totals.get(name, 0) + count
            if error:
                failed.append(number)
                if len(failed) <= 3:
                    click.echo(f"seed {number}:\n{error}")
    seconds = time.perf_counter() - began
    hours = seeds * 32 / 3600
    click.echo(f"{seeds} seeds, {hours:.1f} simulated hours in {seconds:.1f} s: {totals}")
    if failed:
        raise SystemExit(f"{len(failed)} seeds failed, first {sorted(failed)[:10]}")


if __name__ == "__main__":
    main()
