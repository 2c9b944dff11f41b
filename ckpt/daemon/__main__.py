"""Start the upload daemon without a command line framework: trainers do this on demand."""

from __future__ import annotations

import argparse
import gc

from ckpt.daemon.server import LINGER_S, serve_forever
from ckpt.daemon.throttle import lower_priority
from ftcore.base.log import configure_logging


def main() -> None:
    parser = argparse.ArgumentParser(prog="ckpt daemon")
    parser.add_argument("--linger-s", type=float, default=LINGER_S)
    parser.add_argument("--niceness", type=int, default=15)
    parser.add_argument("--metrics-address", default="")
    args = parser.parse_args()
    configure_logging()
    gc.disable()  # the server collects while nothing is being uploaded
    lower_priority(args.niceness)
    host, _, port = args.metrics_address.rpartition(":")
    address = (host or "127.0.0.1", int(port)) if port else None
    serve_forever(linger_s=args.linger_s, metrics_address=address)


if __name__ == "__main__":
    main()
