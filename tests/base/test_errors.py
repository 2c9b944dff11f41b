import importlib
import pkgutil

import pytest
from click.testing import CliRunner

from ftcore.base.cli import FtGroup
from ftcore.base.errors import FtError


def every_error(base=FtError):
    for package in ("ftcore", "lighthouse", "ckpt", "flightrec"):
        root = importlib.import_module(package)
        for module in pkgutil.walk_packages(root.__path__, package + "."):
            if module.name.endswith("errors"):
                importlib.import_module(module.name)
    return subclasses(base)


def subclasses(base):
    for cls in base.__subclasses__():
        yield cls
        yield from subclasses(cls)


@pytest.mark.parametrize("error", list(every_error()))
def test_every_error_says_what_to_do(error):
    assert error.remedy.endswith("."), error


def test_a_command_line_prints_the_remedy_and_no_traceback():
    import click

    class DiskFull(FtError):
        remedy = "Free some space."

    @click.group(cls=FtGroup)
    def tool(): ...

    @tool.command()
    def save():
        raise DiskFull("the disk has 0 bytes left", free_bytes=0)

    result = CliRunner().invoke(tool, ["save"])
    assert result.exit_code == 1
    assert "the disk has 0 bytes left\nFree some space." in result.stderr
    assert "Traceback" not in result.output
