# Names of `unimetric.formats`, written by `make docs`.
from unimetric.formats.hub import Hub as Hub
from unimetric.formats.onnx import Onnx as Onnx
from unimetric.formats.torch_export import TorchExport as TorchExport
