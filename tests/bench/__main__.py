"""Run the benchmarks: `python -m tests.bench [NAME...]`, by default those that take minutes only.

Each prints its table with its conditions; on a loaded machine only ratios within one run mean
anything. Longer ones (ckpt, heal, lighthouse, flightrec) have options of their own.
"""

import subprocess
import sys

SHORT = ("recovery", "groups", "reduce", "guards", "rejoin")
LONG = ("heal", "lighthouse", "flightrec", "ckpt")


def main(names):
    unknown = set(names) - {*SHORT, *LONG}
    if unknown:
        raise SystemExit(f"no benchmark {', '.join(sorted(unknown))}; there are {SHORT + LONG}")
    for name in names or SHORT:
        print(f"\n== {name}", flush=True)
        subprocess.run([sys.executable, "-m", f"tests.bench.{name}"], check=True)


if __name__ == "__main__":
    main(sys.argv[1:])
