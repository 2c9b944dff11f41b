"""Write ftcore_pb2.py from ftcore.proto: `python -m ftcore.wire.generate [DIRECTORY]`.

The generated code refuses to load on a protobuf runtime older than its generator, so the generator
is pinned (grpcio-tools 1.66.2) and its output is committed.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def generate(out: Path) -> None:
    """Run protoc; `out` gets ftcore_pb2.py and ftcore_pb2.pyi."""
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{HERE}"]
    command += [f"--python_out={out}", f"--pyi_out={out}", str(HERE / "ftcore.proto")]
    subprocess.run(command, check=True)


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)
