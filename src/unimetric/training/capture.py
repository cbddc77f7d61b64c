"""Compiled losses: the value and the gradient as one graph.

    minimize = compiled(create("losses", "margin", num_classes=100, dim=128))
    minimize(embeddings, labels).backward()

Comparing a hundred embeddings takes some hundred microseconds. Two graphs, forward and backward, take
as long again for their calls and for passing matrices. A loss is a single number, so its gradient is
known up to a factor as soon as the value is. Here one graph computes both, and the backward pass only
multiplies.

This uses private functions of inductor. If one of them fails, for example after an update of torch,
the loss is compiled the usual way, or runs uncompiled, and a warning says so once.
"""

from __future__ import annotations

import platform
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from unimetric.errors import UnimetricError
from unimetric.kinds import Loss, full_precision


def compiled(module: nn.Module, device: str | torch.device = "cpu", *, fullgraph: bool = True) -> Any:
    """Compile a loss or an objective, for every shape that it is called with.

    Args:
        module: Loss or objective.
        device: Device of its inputs.
        fullgraph: Whether a module that cannot be captured as a whole raises an error.

    Returns:
        A module that is called like the original one.
    """
    # All losses and shapes of a process count together. Beyond the limit, the next one would be an error, and crops not compiled.
    dynamo: Any = torch._dynamo.config
    dynamo.recompile_limit = max(256, dynamo.recompile_limit)
    # Static shapes: otherwise a float that changes becomes a tensor to read back.
    if torch.device(device).type == "cpu":
        # Compile the calls between kernels as well. Recompute masks of up to fifty operations where they are read, because stored
        # truth values are read one by one.
        options: dict[str, Any] = {"cpp_wrapper": True, "realize_opcount_threshold": 50}
        found: Any = torch.compile(module, fullgraph=fullgraph, dynamic=False, backend=with_gradient, options=options)
    else:
        # As one CUDA graph, a hundred small kernels are launched at once, and the host does not fall behind the device.
        found = torch.compile(module, fullgraph=fullgraph, dynamic=False, mode="reduce-overhead")
    if isinstance(module, Loss):
        found.forward = _without_autocast(found.forward)
    return found


def _without_autocast(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Disable autocast outside the graph, whose backward pass it would change."""

    def call(embeddings: Tensor, *others: Any, **named: Any) -> Tensor:
        with full_precision(embeddings):
            return forward(embeddings, *others, **named)

    return call


def compiled_model(model: nn.Module, *, graphs: bool) -> Any:
    """Compile a model, for every shape that it is called with.

    Args:
        model: Model.
        graphs: Whether to launch its kernels as CUDA graphs. A host that launches the kernels of a ResNet-50
            one by one falls behind a fast GPU. The next call overwrites the outputs of a graph.
    """
    return torch.compile(model, dynamic=False, mode="reduce-overhead" if graphs else None)


def with_gradient(graph: fx.GraphModule, inputs: Sequence[Any], *, options: dict[str, Any] | None = None) -> Callable[..., Any]:
    """Compile a graph with inductor, its value and gradient together.

    This is a backend of `torch.compile`. A graph that returns anything but one number, or that was captured
    under autocast, is compiled as it is: forward and backward apart.

    Args:
        graph: Captured graph.
        inputs: Inputs that it was captured with.
        options: Options of inductor.
    """
    try:
        fakes: list[Any] = [node.meta.get("example_value") for node in graph.graph.find_nodes(op="placeholder")]
        usual = not _one_number(graph) or not all(isinstance(fake, Tensor) for fake in fakes)
        if not usual and not torch.is_autocast_enabled(fakes[0].device.type):
            return _compile_joint(graph, fakes, options)
    except Exception as error:  # whatever a changed private function raises
        _warn_once("value and gradient cannot be compiled as one graph", error)
    try:
        return _inductor(graph, list(inputs), options)
    except (ImportError, AttributeError, TypeError) as error:  # the function is gone, or takes other arguments
        _warn_once("inductor cannot be called, so that losses run uncompiled", error)
        return graph


_warned: set[str] = set()


def _warn_once(problem: str, error: Exception) -> None:
    if problem not in _warned:
        _warned.add(problem)
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        warnings.warn(f"{problem} with torch {torch.__version__} ({reason}); results stay the same, but are slower", stacklevel=2)


def _compile_joint(graph: fx.GraphModule, fakes: list[Any], options: dict[str, Any] | None) -> Callable[..., Any]:
    """Compile a graph that returns one number together with its gradient."""
    wanted = [place for place, fake in enumerate(fakes) if fake.requires_grad]
    reached: list[int] = []

    def both(*tensors: Tensor) -> tuple[Tensor, ...]:
        leaves = [tensor.detach().requires_grad_() if place in wanted else tensor for place, tensor in enumerate(tensors)]
        with torch.enable_grad():
            (value,) = graph(*leaves)
        slopes = torch.autograd.grad(value, [leaves[place] for place in wanted], allow_unused=True)
        # A parameter that does not affect the value gets no gradient: with zeros, an optimizer would decay it.
        reached[:] = [place for place, slope in zip(wanted, slopes, strict=True) if slope is not None]
        return value.detach(), *(slope for slope in slopes if slope is not None)

    def in_rows(tensors: Sequence[Tensor]) -> list[Tensor]:
        # Of transposed inputs, inductor returns wrong gradients: the changes below keep no strides.
        return [tensor.contiguous() if place in wanted else tensor for place, tensor in enumerate(tensors)]

    with torch.no_grad():
        with fakes[0].fake_mode:
            fakes = in_rows(fakes)
            joint = make_fx(both, decomposition_table=_decompositions())(*fakes)
        for improve in (_count_in_32_bits, _add_rows, _make_once, *([_turn_right_sides] if platform.machine() == "aarch64" else [])):
            improve(joint)
        joint.recompile()
        run = _inductor(joint, [fake.detach() for fake in fakes], options)

    class Known(torch.autograd.Function):
        """The value, and the gradient that was computed with it."""

        @staticmethod
        def forward(ctx: Any, *tensors: Tensor) -> Tensor:
            value, *slopes = run(*in_rows(tensors))
            ctx.save_for_backward(*slopes)
            return value

        @staticmethod
        def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
            if torch.is_grad_enabled():  # the saved slopes would count as constants
                raise UnimetricError("a compiled loss has no gradient of its gradient", "call the loss itself instead")
            found: list[Tensor | None] = [None] * len(fakes)
            for place, slope in zip(reached, ctx.saved_tensors, strict=True):
                found[place] = slope * upstream
            return tuple(found)

    return lambda *tensors: (Known.apply(*tensors),)


def _one_number(graph: fx.GraphModule) -> bool:
    nodes: Any = graph.graph.output_node().args[0]
    given = [node.meta.get("example_value") if isinstance(node, fx.Node) else None for node in nodes]
    return len(given) == 1 and isinstance(given[0], Tensor) and given[0].requires_grad and given[0].dim() == 0


def _count_in_32_bits(graph: fx.GraphModule) -> None:
    """Compare labels by halves, and count in int32.

    Inductor does not vectorize wider masks and sums of truth values.
    """
    aten, convert, nodes = torch.ops.aten, torch.ops.prims.convert_element_type.default, graph.graph

    def half(labels: fx.Node, shift: int) -> fx.Node:
        moved = nodes.call_function(aten.__rshift__.Scalar, (labels, shift)) if shift else labels
        return nodes.call_function(convert, (moved, torch.int32))

    for target, join in ((aten.eq.Tensor, aten.bitwise_and.Tensor), (aten.ne.Tensor, aten.bitwise_or.Tensor)):
        for node in nodes.find_nodes(op="call_function", target=target):
            left, right = _read(node)
            if node.meta["val"].dim() == 2 and left.meta["val"].dtype == right.meta["val"].dtype == torch.int64:
                with nodes.inserting_before(node):
                    low, high = (nodes.call_function(target, (half(left, shift), half(right, shift))) for shift in (0, 32))
                    node.replace_all_uses_with(nodes.call_function(join, (low, high)), propagate_meta=True)
    for target, summing in ((aten.any.dim, aten.sum.dim_IntList), (aten.any.default, aten.sum.default)):
        for node in nodes.find_nodes(op="call_function", target=target):
            mask, *where = _read(node)
            if mask.meta["val"].dtype == torch.bool:
                with nodes.inserting_before(node):
                    count = nodes.call_function(summing, (mask, *([where[:1], *where[1:]] if where else [])), {"dtype": torch.int32})
                    node.replace_all_uses_with(nodes.call_function(aten.gt.Scalar, (count, 0)), propagate_meta=True)
    for target in (aten.sum.dim_IntList, aten.sum.default):
        for node in nodes.find_nodes(op="call_function", target=target):
            if _read(node)[0].meta["val"].dtype == torch.bool and "dtype" not in node.kwargs:
                with nodes.inserting_before(node):
                    count = nodes.call_function(target, node.args, {"dtype": torch.int32})
                    node.replace_all_uses_with(nodes.call_function(convert, (count, torch.int64)), propagate_meta=True)
    nodes.eliminate_dead_code()


def _add_rows(graph: fx.GraphModule) -> None:
    """Add the gradients of selected rows row by row.

    Inductor adds entries one by one, each under a lock. All rows in order are replaced by the matrix itself.
    """
    aten, nodes = torch.ops.aten, graph.graph

    def in_order(index: fx.Node, rows: int) -> bool:
        start, step = (index.kwargs.get(name) for name in ("start", "step"))
        return index.target is torch.ops.prims.iota.default and (index.args, start, step) == ((rows,), 0, 1)

    for node in nodes.find_nodes(op="call_function", target=aten.index.Tensor):
        matrix, indices = _read(node)
        if len(indices) == 1 and in_order(indices[0], matrix.meta["val"].shape[0]):
            node.replace_all_uses_with(matrix)
    for node in nodes.find_nodes(op="call_function", target=aten.index_put.default):
        room, indices, values, *accumulate = _read(node)
        shape = room.meta["val"].shape
        if len(shape) != 2 or len(indices) != 1 or indices[0].meta["val"].dtype != torch.int64 or accumulate != [True]:
            continue
        with nodes.inserting_before(node):
            if in_order(indices[0], shape[0]):
                added = nodes.call_function(aten.add.Tensor, (room, values))
            else:
                column = nodes.call_function(aten.unsqueeze.default, (indices[0], 1))
                places = nodes.call_function(aten.expand.default, (column, list(values.meta["val"].shape)))
                added = nodes.call_function(aten.scatter_add.default, (room, 0, places, values))
        node.replace_all_uses_with(added, propagate_meta=True)
    nodes.eliminate_dead_code()


def _make_once(graph: fx.GraphModule) -> None:
    """Store a gradient before it is added to its transpose.

    Otherwise, each entry is computed twice.
    """
    import torch._inductor.inductor_prims  # makes the operator known

    aten, nodes = torch.ops.aten, graph.graph
    for node in nodes.find_nodes(op="call_function", target=aten.add.Tensor):
        slope, turned = _read(node)
        if isinstance(turned, fx.Node) and turned.target is aten.permute.default and _read(turned)[0] is slope:
            with nodes.inserting_before(turned):
                stride = list(slope.meta["val"].stride())
                made = nodes.call_function(torch.ops.prims.inductor_force_stride_order.default, (slope, stride))
            for user in (node, turned):
                user.replace_input_with(slope, made)


def _read(node: fx.Node) -> Any:
    """Return the arguments of a node, whose types depend on its operator."""
    return node.args


def _turn_right_sides(graph: fx.GraphModule) -> None:
    """Copy a transposed right side of a product into rows.

    On ARM, torch computes `a @ b.T` with oneDNN and all other products with BLAS. BLAS takes half the
    time for a hundred rows, and the same time for seven hundred.
    """
    import torch._inductor.inductor_prims  # makes the operator known

    for product in graph.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default):
        left, right = _read(product)
        a, b = left.meta["val"], right.meta["val"]
        if b.dtype == torch.float32 and b.stride(0) == 1 and a.is_contiguous():
            with graph.graph.inserting_before(product):
                turned = graph.graph.call_function(torch.ops.prims.inductor_force_stride_order.default, (right, [b.shape[1], 1]))
            product.args = (left, turned)


def _decompositions() -> dict[Any, Any]:
    from torch._inductor.decomposition import select_decomp_table

    return select_decomp_table()


def _inductor(graph: fx.GraphModule, inputs: list[Any], options: dict[str, Any] | None) -> Callable[..., Any]:
    import torch._inductor  # late: the compiler takes a second to load

    return torch._inductor.compile(graph, inputs, options=options)
