"""Every checkpointer behind one face: save, wait until staged, wait until durable, load."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.bench.ckpt.limits import sync_files

State = dict[str, torch.Tensor]


class Contestant:
    """Saves replace nothing: each step has a place of its own, and old ones are removed."""

    syncs = True  # False: what it calls done is not on the disk yet; the benchmark adds fsync

    def __init__(self, directory: Path, state: State) -> None:
        self.directory, self.state, self.step = directory, state, 1  # flash saves no step 0
        self.directory.mkdir(parents=True, exist_ok=True)
        self.open()

    def open(self) -> None: ...

    def place(self) -> Path:
        return self.directory / f"step-{self.step}"

    def save(self) -> None:
        raise NotImplementedError

    def wait_staged(self) -> None: ...

    def wait_done(self) -> None: ...

    def wait_durable(self) -> None:
        self.wait_done()
        if not self.syncs:
            sync_files(self.place() if self.place().exists() else self.directory)

    def load(self, into: State) -> None:
        raise NotImplementedError

    def forget(self) -> None:
        """Remove the last step."""
        shutil.rmtree(self.place(), ignore_errors=True)

    def close(self) -> None: ...


class Ours(Contestant):
    def open(self) -> None:
        from ckpt import Checkpointer

        self.checkpoints = Checkpointer(str(self.directory), keep_last=2)
        self.checkpoints.prepare({"model": self.state})

    def place(self) -> Path:
        return self.directory / f"step-{self.step:010d}"

    def save(self) -> None:
        self.handle = self.checkpoints.save({"model": self.state}, step=self.step)

    def wait_staged(self) -> None:
        self.handle.wait_staged()

    def wait_done(self) -> None:
        self.handle.wait_durable()

    def load(self, into: State) -> None:
        """From the disk: the nearest tier would be the daemon's memory."""
        self.checkpoints._memory = lambda: None
        assert self.checkpoints.restore({"model": into}) == self.step

    def forget(self) -> None: ...

    def close(self) -> None:
        self.checkpoints.close()


class TorchSave(Contestant):
    def save(self) -> None:
        self.place().mkdir()
        with open(self.place() / "state.pt", "wb") as file:
            torch.save(self.state, file)
            os.fsync(file.fileno())

    def load(self, into: State) -> None:
        loaded = torch.load(self.place() / "state.pt", weights_only=True)
        for name, tensor in loaded.items():
            into[name].copy_(tensor)


class Safetensors(Contestant):
    syncs = False

    def save(self) -> None:
        from safetensors.torch import save_file

        self.place().mkdir()
        save_file(self.state, self.place() / "state.safetensors")
        sync_files(self.place())

    def wait_durable(self) -> None: ...

    def load(self, into: State) -> None:
        from safetensors.torch import load_file

        for name, tensor in load_file(self.place() / "state.safetensors").items():
            into[name].copy_(tensor)


class DcpSync(Contestant):
    def open(self) -> None:
        import torch.distributed.checkpoint as dcp

        self.dcp = dcp

    def save(self) -> None:
        alone = not torch.distributed.is_initialized()
        self.dcp.save(self.state, checkpoint_id=self.place(), no_dist=alone)

    def load(self, into: State) -> None:
        self.dcp.load(into, checkpoint_id=self.place(), no_dist=True)


class DcpThread(DcpSync):
    """async_save in a thread; the stager and its buffers are kept, as the documentation says."""

    def open(self) -> None:
        super().open()
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        init_group()
        self.stager = DefaultStager(StagingOptions(False, False, False, False))

    def save(self) -> None:
        self.future = self.dcp.async_save(
            self.state, checkpoint_id=self.place(), async_stager=self.stager
        )

    def wait_done(self) -> None:
        self.future.result()


class DcpProcess(DcpSync):
    """async_save in a process, staged on a thread into shared memory ("zero overhead")."""

    def open(self) -> None:
        super().open()
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        init_group()
        pin = torch.cuda.is_available()
        self.stager = DefaultStager(StagingOptions(pin, True, True, pin))

    def save(self) -> None:
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        self.response = self.dcp.async_save(
            self.state,
            checkpoint_id=self.place(),
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
            async_stager=self.stager,
        )

    def wait_staged(self) -> None:
        self.response.staging_completion.result()

    def wait_done(self) -> None:
        self.response.upload_completion.result()


class TorchCheckpointing(Contestant):
    syncs = False

    def open(self) -> None:
        from torch_checkpointing import CheckpointManager
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        storage = LocalFileSystemStorageConfig(use_direct_io=False)
        self.manager = CheckpointManager.Config(storage_config=storage).build()

    def save(self) -> None:
        self.future = self.manager.save(str(self.place()), {"model": self.state})

    def wait_staged(self) -> None:
        self.manager._staging_future.result()

    def wait_done(self) -> None:
        self.future.result()

    def load(self, into: State) -> None:
        loaded = self.manager.load(str(self.place()), {"model": into})["model"]
        for name, tensor in loaded.items():
            if tensor is not into[name]:
                into[name].copy_(tensor)

    def close(self) -> None:
        self.manager.close()


class Flash(Contestant):
    """DLRover flash checkpoint with its saver in a process of its own."""

    syncs = False

    def open(self) -> None:
        init_group()
        os.environ.setdefault("LOCAL_RANK", "0")
        from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer

        self.checkpointer = DdpCheckpointer(str(self.directory))

    def save(self) -> None:
        self.checkpointer.save_checkpoint(self.step, self.state, str(self.place() / "rank_0.pt"))

    def wait_done(self) -> None:
        tracker = self.directory / "dlrover_latest.txt"
        wait_until(lambda: tracker.exists() and tracker.read_text() == str(self.step))

    def load(self, into: State) -> None:
        loaded = torch.load(self.place() / "rank_0.pt", weights_only=True)
        for name, tensor in loaded.items():
            into[name].copy_(tensor)

    def close(self) -> None:
        self.checkpointer._engine.close()


class TorchSnapshot(Contestant):
    syncs = False

    def open(self) -> None:
        import torchsnapshot

        self.ts = torchsnapshot

    def save(self) -> None:
        state = {"model": self.ts.StateDict(**self.state)}
        self.pending = self.ts.Snapshot.async_take(str(self.place()), state)

    def wait_done(self) -> None:
        self.pending.wait()

    def load(self, into: State) -> None:
        self.ts.Snapshot(str(self.place())).restore({"model": self.ts.StateDict(**into)})


CONTESTANTS: dict[str, type[Contestant]] = {
    "ours": Ours,
    "torch.save": TorchSave,
    "safetensors": Safetensors,
    "dcp": DcpSync,
    "dcp thread": DcpThread,
    "dcp process": DcpProcess,
    "torch_checkpointing": TorchCheckpointing,
    "flash": Flash,
    "torchsnapshot": TorchSnapshot,
}
# What a peer needs beside torch; it goes into a virtual environment of its own.
REQUIREMENTS = {
    "safetensors": ("safetensors==0.8.0",),
    "torch_checkpointing": ("torch_checkpointing==0.1.1",),
    "flash": ("dlrover==0.6.1", "kubernetes"),
    "torchsnapshot": ("torchsnapshot==0.1.0",),
}


def init_group() -> None:
    """A gloo group of one rank, which some peers want."""
    if not torch.distributed.is_initialized():
        store: Any = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)


def wait_until(is_true: Callable[[], bool], *, timeout_s: float = 120) -> None:
    end_s = time.monotonic() + timeout_s
    while not is_true():
        if time.monotonic() > end_s:
            raise TimeoutError(f"not within {timeout_s:g} s")
        time.sleep(0.002)
