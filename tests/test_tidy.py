"""The architecture as a test: who may import whom, what a pure file may touch, how big it is."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("ftcore", "lighthouse", "ckpt", "flightrec")
MAY_IMPORT = {
    "ftcore.base": {"prometheus_client", "click"},
    "ftcore.wire": {"ftcore.base", "grpc", "google"},
    "ftcore.control": {"ftcore.base", "ftcore.wire"},
    # flightrec: a trainer warms and reads its own recorder; the manager's look is the analyzer
    "ftcore": {"ftcore", "flightrec", "torch", "numpy", "grpc", "click", "xxhash", "matplotlib"},
    "ftcore.demo": {"ftcore", "ckpt", "torch", "click", "matplotlib"},  # a user of both
    "lighthouse": {"lighthouse", "ftcore.base", "ftcore.wire", "grpc", "aiohttp", "click", "google"}
    | {"prometheus_client", "opentelemetry"},
    "ckpt": {"ckpt", "ftcore.base", "ftcore.statedict", "torch", "numpy", "fsspec", "s3fs"}
    | {"botocore", "obstore", "click", "xxhash", "aiohttp", "prometheus_client"},
    "flightrec": {"flightrec", "ftcore.base", "click", "fsspec"},
}
PURE = {"ftcore/guards.py", "lighthouse/quorum.py", "lighthouse/core.py"}
PURE |= {"ftcore/notice.py", "ftcore/base/ladder.py", "lighthouse/spares.py", "lighthouse/flaps.py"}
PURE |= {f"ftcore/data/{name}.py" for name in ("order", "ledger", "seeds")}
PURE |= {f"ftcore/heal/{name}.py" for name in ("parts", "work", "pace")}
PURE |= {"lighthouse/torchft_quorum.py", "lighthouse/lease/candidate.py"}
PURE |= {f"ckpt/{name}.py" for name in ("plan", "boxes", "manifest", "assemble", "reading")}
PURE |= {"ckpt/retention.py"}
PURE |= {
    "lighthouse/refusal.py",
    "lighthouse/rivals.py",
    "lighthouse/goodput.py",
    "lighthouse/histogram.py",
}
PURE_PACKAGES = {"ftcore/control"}
IMPURE = {"time", "socket", "os", "threading", "asyncio", "random", "logging", "torch", "grpc"}
LINES_MAX, FUNCTION_LINES_MAX = 450, 70


def modules():
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if not path.name.endswith(("_pb2.py", "_pb2_grpc.py")):
                yield str(path.relative_to(ROOT))


def tree(name):
    return ast.parse((ROOT / name).read_text())


def imports(name, *, top_level_only=False):
    for node in tree(name).body if top_level_only else ast.walk(tree(name)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def inside(module, packages):
    return any(module == p or module.startswith(p + ".") for p in packages)


def owner_of(name):
    module = name.removesuffix(".py").replace("/", ".")
    return max((p for p in MAY_IMPORT if inside(module, {p})), key=len)


def is_pure(name):
    return name in PURE or any(name.startswith(p + "/") for p in PURE_PACKAGES)


@pytest.mark.parametrize("name", list(modules()))
def test_imports_point_down(name):
    owner = owner_of(name)
    for module in imports(name):
        if module.split(".")[0] not in sys.stdlib_module_names and not inside(module, {owner}):
            assert inside(module, MAY_IMPORT[owner]), f"{name} imports {module}; {owner} may not"


@pytest.mark.parametrize("name", [n for n in modules() if is_pure(n)])
def test_pure_files_touch_no_world(name):
    touched = {m.split(".")[0] for m in imports(name)} & IMPURE
    assert not touched, f"{name} decides, so it may not import {touched}: pass the value in"


@pytest.mark.parametrize("name", list(modules()))
def test_a_file_is_one_idea_and_says_it_first(name):
    text = (ROOT / name).read_text()
    assert ast.get_docstring(ast.parse(text)), f"{name} does not say what it is"
    assert text.count("\n") <= LINES_MAX, f"{name} is long: look for the second idea"


@pytest.mark.parametrize("name", list(modules()))
def test_a_function_fits_on_a_screen(name):
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = node.end_lineno - node.lineno + 1
            assert lines <= FUNCTION_LINES_MAX, f"{name}: {node.name} has {lines} lines"


@pytest.mark.parametrize(
    "package", ["lighthouse", "flightrec", "ftcore.base", "ftcore.wire", "ftcore.data"]
)
def test_light_packages_never_import_torch(package):
    command = package.split(".")[0] + ".__main__"
    code = f"import {package}, {command}, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_the_checkpoint_daemon_starts_without_torch():
    """It is started again when it is killed, and saves wait for it."""
    code = "import ckpt.daemon.__main__, ckpt.stores.s3, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
