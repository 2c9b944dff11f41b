"""One replica group of the demo: `python -m ftcore.demo.worker CONFIG_JSON`.

Every event of ftcore becomes one JSON line on stdout, so that the demo sees what happened when.
While a group is missing near the end, steps take a second, so that it can return on a slow machine.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
import time
from collections.abc import Iterable

import torch
import torch.nn.functional as F

from ckpt import Checkpointer
from ftcore import ElasticSampler, Manager
from ftcore.base.errors import FtError
from ftcore.demo.model import Llama
from ftcore.demo.text import Corpus
from ftcore.process_group.base import Group

BATCH = 4
ONE_GPU = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_NET": "Socket",
    "NCCL_IB_DISABLE": "1",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
}


class JsonLines(logging.Handler):
    """Log records as JSON lines with the time at which they were made."""

    def emit(self, record: logging.LogRecord) -> None:
        facts = getattr(record, "facts", {})
        say(record.getMessage(), at=record.created, **facts)


def say(event: str, /, **facts: object) -> None:
    line = {"event": event, "at": time.time(), **facts}
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def sha256(tensors: Iterable[torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _group(device: torch.device, name: str) -> Group | None:
    """NCCL on a GPU. Groups that share one pose as hosts of their own, since NCCL wants one rank
    of a host for each GPU; they then talk over sockets."""
    if device.type != "cuda":
        return None
    from ftcore.process_group.nccl import NcclGroup

    torch.use_deterministic_algorithms(True)
    if torch.cuda.device_count() == 1:
        os.environ.update(ONE_GPU, NCCL_HOSTID=name)
    return NcclGroup(device=device)


def _checkpoints(config: dict[str, object]) -> Checkpointer | None:
    if "checkpoints" not in config:
        return None
    return Checkpointer(str(config["checkpoints"]), keep_last=2, linger_s=10.0, show_progress=False)


def train(config: dict[str, object]) -> None:
    torch.manual_seed(7)
    corpus = Corpus()
    device = torch.device("cuda", 0) if config["device"] == "cuda" else torch.device("cpu")
    model = Llama(corpus.vocabulary).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    shards, steps = int(str(config["shards"])), int(str(config["steps"]))
    data = ElasticSampler(corpus, shards=shards, per_shard=BATCH)
    with Manager(
        model,
        optimizer,
        data=data,
        group=_group(device, str(config["replica_id"])),
        checkpoints=_checkpoints(config),
        checkpoint_every=int(str(config.get("checkpoint_every", 1))),
        mode=config["mode"],  # type: ignore[arg-type]
        lighthouse=str(config["lighthouse"]),
        replica_id=str(config["replica_id"]),
    ) as manager:
        for step in manager.steps(steps):
            ends_at = time.monotonic() + float(str(config["step_time_s"]))
            for shard in step:
                say("shard", step=shard.step, shard=shard.index)
                inputs, targets = (t.to(device) for t in corpus.batch(shard.samples))
                loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
                loss.backward()
                shard.log(loss)
            optimizer.step()
            is_late = step.index >= steps * 3 // 4 and len(step.members) < int(
                str(config["groups"])
            )
            time.sleep(1.0 if is_late else max(0.0, ends_at - time.monotonic()))
    say(
        "finished",
        sha=sha256(model.parameters()),
        parameters=sum(p.numel() for p in model.parameters()),
    )


def main() -> None:
    config = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    log = logging.getLogger("ftcore")
    log.setLevel(logging.DEBUG)
    log.addHandler(JsonLines())
    say("started")
    try:
        train(config)
    except FtError as error:
        say("error", what=str(error), remedy=error.remedy)
        raise SystemExit(1) from error


if __name__ == "__main__":
    main()
