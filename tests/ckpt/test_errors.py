"""Every error of the package says what to do."""

import importlib
import pkgutil

import pytest

import ckpt
from ftcore.base.errors import FtError


def classes():
    for module in pkgutil.walk_packages(ckpt.__path__, "ckpt."):
        if "__main__" not in module.name:
            importlib.import_module(module.name)
    todo, found = [FtError], set()
    while todo:
        for kind in todo.pop().__subclasses__():
            if kind.__module__.startswith("ckpt.") and kind not in found:
                found.add(kind)
            todo.append(kind)
    return sorted(found, key=lambda kind: kind.__name__)


@pytest.mark.parametrize("kind", classes(), ids=lambda kind: kind.__name__)
def test_an_error_has_a_remedy_that_is_a_sentence(kind):
    remedy = kind("what happened").remedy
    assert len(remedy.split()) > 3 and remedy.rstrip().endswith((".", ")", "`"))
