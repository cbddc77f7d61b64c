"""ONNX: one graph from pixels to embeddings, for onnxruntime and other runtimes."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from unimetric.arguments import Count
from unimetric.errors import UnimetricError, first_line
from unimetric.files import atomic
from unimetric.formats._trace import quiet, trace
from unimetric.kinds import Check, Embed, Format, Images

#: Key of the notes in the metadata of a file.
NOTES = "unimetric"

_INSTALL = "pip install 'unimetric[onnx]'"


class Onnx(Format):
    """One ONNX file with resizing, crop, normalization, network, head and L2 normalization.

    The input `images` is uint8 (B, H, W, 3), red first, with any batch, height and width. The output
    `embeddings` is float32 (B, D). The images of a batch have one size.

    Resizing and the last normalization are float32 at every precision. With `int8`, matrix products and
    convolutions with weights are quantized. Weights have 7 bits, because 8 overflow on processors without
    VNNI.

    Reference:
        ONNX: open neural network exchange (Bai et al., 2019).

    Args:
        precision: Numbers of the network: `fp32`, `fp16`, or `int8` with static ranges from training images.
        calibration: Number of training images that set the ranges of `int8`.
    """

    suffix = ".onnx"

    def __init__(self, *, precision: Literal["fp32", "fp16", "int8"] = "fp32", calibration: Count = 128) -> None:
        self.precision, self.calibration = precision, calibration
        self.calibrated, self.rounds = precision == "int8", precision != "fp32"

    def write(self, model: Any, path: Path, *, notes: dict[str, Any], images: Images, check: Check) -> None:
        onnx, _ = _libraries()
        graph = _convert(model)
        if self.precision == "fp16":
            graph = _halve(graph)
        if self.precision == "int8":
            graph = _quantize(graph, images(), self.calibration)
        _strip(graph)
        notes = {"precision": self.precision, **notes, **check(_runner(graph.SerializeToString()))}
        onnx.helper.set_model_props(graph, {NOTES: json.dumps(notes)})
        onnx.checker.check_model(graph)
        with atomic(path) as temporary:
            onnx.save(graph, temporary)

    def read(self, path: Path) -> tuple[Embed, dict[str, Any]]:
        onnx, _ = _libraries()
        hint = "export it again with `unimetric export RUN --to onnx --out mine.onnx`"
        if not path.is_file():
            raise UnimetricError(f"{path}: no such file", hint)
        try:
            graph = onnx.load(path, load_external_data=False)
            stored = {each.key: each.value for each in graph.metadata_props}
            notes = json.loads(stored[NOTES])
            return _runner(str(path)), dict(notes)
        except KeyError:
            raise UnimetricError(f"{path}: was not exported by Unimetric: its metadata has no `{NOTES}`", hint) from None
        except Exception as error:  # protobuf, JSON and onnxruntime raise many types for an invalid file
            raise UnimetricError(f"{path}: unreadable: {first_line(error)}", hint) from None


def _libraries() -> tuple[Any, Any]:
    """Import onnx and onnxruntime, which are not dependencies of the package."""
    try:
        import onnx
        import onnxruntime
    except ImportError as error:
        raise UnimetricError(f"ONNX files require {error.name}", _INSTALL) from None
    return onnx, onnxruntime


def _convert(model: Any) -> Any:
    """Convert a module to a graph whose batch, height and width are free."""
    program = trace(model)
    try:
        with quiet():
            converted: Any = torch.onnx.export(program, dynamo=True, verbose=False, input_names=["images"], output_names=["embeddings"])
    except ImportError as error:
        raise UnimetricError(f"ONNX files require {error.name}", _INSTALL) from None
    except Exception as error:  # onnxscript raises many types for an operation without a translation
        raise UnimetricError(f"the model cannot be converted to ONNX: {first_line(error)}", "use `--to torch_export`") from error
    graph = converted.model_proto
    for axis, name in enumerate(("batch", "height", "width")):
        graph.graph.input[0].type.tensor_type.shape.dim[axis].dim_param = name
    graph.graph.output[0].type.tensor_type.shape.dim[0].dim_param = "batch"
    return graph


def _is_inside(node: Any) -> bool:
    """Return whether a node is part of the network, not of the crop or the last normalization.

    The exporter stores the path of the submodule that made each node.
    """
    scopes = next((each.value for each in node.metadata_props if each.key == "pkg.torch.onnx.name_scopes"), "")
    return "'model" in scopes


def _halve(graph: Any) -> Any:
    """Convert the values and weights of the network to float16, with casts at its two ends.

    The converter of onnxruntime also rounds what its excluded nodes exchange, which moves the crop by pixels.
    """
    import onnx

    def is_halved(node: Any) -> bool:
        return _is_inside(node) and node.op_type != "AveragePool"  # onnxruntime has none in float16 for ARM

    single, half = onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16
    graph = onnx.shape_inference.infer_shapes(graph)
    weights = {each.name: each for each in graph.graph.initializer}
    known = {each.name: each.type.tensor_type.elem_type for each in (*graph.graph.input, *graph.graph.value_info, *graph.graph.output)}
    known |= {name: each.data_type for name, each in weights.items()}
    halves = {name for node in graph.graph.node if is_halved(node) for name in node.output if known.get(name) == single}
    outputs = {each.name for each in graph.graph.output}
    nodes: list[Any] = []
    cast: set[str] = set()

    def convert(name: str, to: int) -> str:
        """Return the name of a value in another precision. It is cast before its first use."""
        other = f"{name}_as_{'half' if to == half else 'single'}"
        if other not in cast and name in weights:
            graph.graph.initializer.append(onnx.numpy_helper.from_array(_to_half(onnx.numpy_helper.to_array(weights[name])), other))
        elif other not in cast:
            nodes.append(onnx.helper.make_node("Cast", [name], [other], to=to, name=f"node_{other}"))
        cast.add(other)
        return other

    for node in graph.graph.node:
        within = is_halved(node)
        for index, name in enumerate(node.input):
            if within and known.get(name) == single and name not in halves and node.op_type != "Resize":
                node.input[index] = convert(name, half)
            elif not within and name in halves:
                node.input[index] = convert(name, single)
        nodes.append(node)
        for attribute in node.attribute if within else ():
            if attribute.name in ("to", "dtype") and attribute.i == single:
                attribute.i = half
            if attribute.t.data_type == single:
                attribute.t.CopyFrom(onnx.numpy_helper.from_array(_to_half(onnx.numpy_helper.to_array(attribute.t)), attribute.t.name))
        for index, name in enumerate(node.output):
            if name in outputs & halves:
                node.output[index] = f"{name}_in_half"
                nodes.append(onnx.helper.make_node("Cast", [f"{name}_in_half"], [name], to=single, name=f"node_{name}_cast"))
    used = {name for node in nodes for name in node.input}
    initializers = [each for each in graph.graph.initializer if each.name in used]
    made = onnx.helper.make_graph(nodes, graph.graph.name, graph.graph.input, graph.graph.output, initializers)
    return onnx.helper.make_model(made, opset_imports=graph.opset_import, ir_version=graph.ir_version, functions=graph.functions)


def _to_half(values: np.ndarray) -> np.ndarray:
    """Round to float16, with infinities for none of the finite values."""
    largest = float(np.finfo(np.float16).max)
    return np.where(np.isfinite(values), values.clip(-largest, largest), values).astype(np.float16)


def _quantize(graph: Any, images: Iterator[np.ndarray], count: int) -> Any:
    import onnx
    from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static

    class Reader(CalibrationDataReader):
        left = count

        def get_next(self) -> dict[str, np.ndarray] | None:
            self.left -= 1
            image = next(images, None) if self.left >= 0 else None
            return None if image is None else {"images": image}

    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "fp32.onnx", Path(folder) / "int8.onnx"
        onnx.save(graph, source)
        with quiet():
            quantize_static(
                source,
                target,
                Reader(),
                op_types_to_quantize=["Conv", "Gemm", "MatMul"],
                nodes_to_exclude=[node.name for node in graph.graph.node if not _is_inside(node)],
                per_channel=True,
                reduce_range=True,
                activation_type=QuantType.QUInt8,
                weight_type=QuantType.QInt8,
                extra_options={"MatMulConstBOnly": True},
            )
        return onnx.load(target)


def _strip(graph: Any) -> None:
    """Remove the notes of the exporter, which contain paths and code of this machine."""
    for part in (graph, graph.graph, *graph.graph.node, *graph.graph.value_info, *graph.graph.input, *graph.graph.output, *graph.functions):
        part.doc_string = ""
        del part.metadata_props[:]
    del graph.graph.value_info[:]
    graph.producer_name, graph.producer_version = "unimetric", ""


def _runner(graph: bytes | str) -> Embed:
    """Return a function that runs a graph, on a GPU if onnxruntime supports it there."""
    _, runtime = _libraries()
    options = runtime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = torch.get_num_threads()
    wanted = [name for name in ("CUDAExecutionProvider", "CPUExecutionProvider") if name in runtime.get_available_providers()]
    session = runtime.InferenceSession(graph, options, providers=wanted)

    def run(images: np.ndarray) -> np.ndarray:
        return session.run(None, {"images": images})[0]

    return run
