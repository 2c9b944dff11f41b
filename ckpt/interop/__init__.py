"""Other formats: our steps under torch.distributed.checkpoint, theirs under our restore, exports.

`CkptWriter` and `CkptReader` let `dcp.save` and `dcp.load` work on our format. `restore_foreign`
fills a state from a stock DCP checkpoint or from safetensors. `export` writes stock DCP, sharded
safetensors with an index, or one `torch.save` file.
"""

from ckpt.interop.dcp_reader import CkptReader
from ckpt.interop.dcp_writer import CkptWriter
from ckpt.interop.errors import ForeignFormat
from ckpt.interop.export import FORMS, export
from ckpt.interop.foreign import restore_foreign

__all__ = ["FORMS", "CkptReader", "CkptWriter", "ForeignFormat", "export", "restore_foreign"]
