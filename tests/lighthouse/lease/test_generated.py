import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_committed_etcd_messages_are_what_the_proto_says(tmp_path):
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I.", f"--python_out={tmp_path}"]
    command += [f"--pyi_out={tmp_path}", "lighthouse/lease/etcd.proto"]
    subprocess.run(command, cwd=ROOT, check=True)
    for made in (tmp_path / "lighthouse" / "lease").iterdir():
        assert made.read_text() == (ROOT / "lighthouse" / "lease" / made.name).read_text()
