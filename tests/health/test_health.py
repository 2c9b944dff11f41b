"""A rank proves itself: healthy machines pass, and each kind of fault is found and named."""

import torch

from ftcore import health
from ftcore.health import CHECKS, Patient, examine

CPU = Patient(device=torch.device("cpu"))


def test_a_healthy_machine_passes():
    assert examine(CHECKS, CPU) == ""


def test_one_wrong_bit_in_a_product_is_found(monkeypatch):
    def wrong(left, right):
        product = torch.mm(left, right)
        product[17, 3] += 1
        return product

    monkeypatch.setattr(
        torch.Tensor,
        "__matmul__",
        lambda a, b: wrong(a, b) if a.is_floating_point() else torch.matmul(a, b),
    )
    assert examine([health.matmul], CPU) == (
        "health check matmul: 1 of 256 rows of a product on cpu differ"
    )


def test_memory_that_does_not_hold_is_found(monkeypatch):
    real = torch.Tensor.fill_

    def stuck_bit(tensor, value):
        real(tensor, value)
        tensor[5] |= 1 << 3
        return tensor

    monkeypatch.setattr(torch.Tensor, "fill_", stuck_bit)
    assert "1 words of 16 MiB on cpu do not hold" in examine([health.memory], CPU)


def test_a_full_disk_is_found(monkeypatch):
    monkeypatch.setattr(health, "DISK_FREE_BYTES", 1 << 62)
    assert "MiB free, less than" in examine([health.disk], CPU)


def test_a_folder_that_cannot_be_written_is_found(monkeypatch, tmp_path):
    monkeypatch.setattr(health.tempfile, "gettempdir", lambda: str(tmp_path / "gone"))
    assert "health check disk: FileNotFoundError" in examine([health.disk], CPU)


def test_a_lighthouse_that_does_not_answer_is_not_compared_with():
    assert examine([health.clock], Patient(device=CPU.device, lighthouse=("127.0.0.1:1",))) == ""


def test_a_check_of_your_own_is_asked_too_and_may_raise():
    def ecc(patient):
        raise RuntimeError("no answer from the driver")

    def fan(patient):
        return f"the fan of {patient.device} stands still"

    assert examine([ecc], CPU) == "health check ecc: RuntimeError: no answer from the driver"
    assert examine([fan], CPU) == "health check fan: the fan of cpu stands still"


def test_no_checks_are_no_objection():
    assert examine((), CPU) == ""
