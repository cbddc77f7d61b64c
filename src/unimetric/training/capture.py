"""A loss, compiled: its value and its gradient as one graph.

    minimise = compiled(create("losses", "margin", num_classes=100, dim=128))
    minimise(embeddings, labels).backward()

A hundred embeddings are compared in some hundred microseconds. Two graphs, one forwards and one backwards, spend as much again on being
called and on handing matrices from one to the other. What is minimised is a single number, and its gradient is known up to a factor as
soon as the number is: here one graph gives both, and the backward pass only multiplies.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from unimetric.errors import UnimetricError


def compiled(module: nn.Module, device: str | torch.device = "cpu", *, fullgraph: bool = True) -> Any:
    """A loss or an objective, called as before, and compiled for every shape that it meets.

    Args:
        module: what is minimised.
        device: where it is.
        fullgraph: refuse what cannot be captured as a whole.
    """
    # Static, since else a float that changes becomes a number to fetch.
    if torch.device(device).type == "cpu":
        # The calls between the kernels are compiled as well, and a mask that costs thirty operations is still made wherever it is read:
        # truths that are stored are read number by number.
        options: dict[str, Any] = {"cpp_wrapper": True, "realize_opcount_threshold": 50}
        return torch.compile(module, fullgraph=fullgraph, dynamic=False, backend=with_gradient, options=options)
    # A hundred small kernels or several: as one CUDA graph the host launches them at once, and does not fall behind the device.
    return torch.compile(module, fullgraph=fullgraph, dynamic=False, mode="reduce-overhead")


def with_gradient(graph: fx.GraphModule, inputs: Sequence[Any], *, options: dict[str, Any] | None = None) -> Callable[..., Any]:
    """A backend of torch.compile: inductor, given the number that a graph makes and its gradient as one graph.

    Whatever makes something else than one number, or is captured under autocast, inductor gets as it is: forwards and backwards apart.

    Args:
        graph: what was captured.
        inputs: what it was captured with.
        options: inductor's.
    """
    fakes: list[Any] = [node.meta.get("example_value") for node in graph.graph.find_nodes(op="placeholder")]
    if not _one_number(graph) or not all(isinstance(fake, Tensor) for fake in fakes) or torch.is_autocast_enabled(fakes[0].device.type):
        return _inductor(graph, list(inputs), options)
    wanted = [place for place, fake in enumerate(fakes) if fake.requires_grad]
    reached: list[int] = []

    def both(*tensors: Tensor) -> tuple[Tensor, ...]:
        leaves = [tensor.detach().requires_grad_() if place in wanted else tensor for place, tensor in enumerate(tensors)]
        with torch.enable_grad():
            (value,) = graph(*leaves)
        slopes = torch.autograd.grad(value, [leaves[place] for place in wanted], allow_unused=True)
        # A parameter without a part in the value gets no gradient: zeros would let an optimiser decay it.
        reached[:] = [place for place, slope in zip(wanted, slopes, strict=True) if slope is not None]
        return value.detach(), *(slope for slope in slopes if slope is not None)

    with torch.no_grad():
        with fakes[0].fake_mode:
            joint = make_fx(both, decomposition_table=_decompositions())(*fakes)
        for improve in (_count_in_32_bits, _add_rows, _make_once, *([_turn_right_sides] if platform.machine() == "aarch64" else [])):
            improve(joint)
        joint.recompile()
        run = _inductor(joint, [fake.detach() for fake in fakes], options)

    class Known(torch.autograd.Function):
        """The number, and the gradient that came with it."""

        @staticmethod
        def forward(ctx: Any, *tensors: Tensor) -> Tensor:
            value, *slopes = run(*tensors)
            ctx.save_for_backward(*slopes)
            return value

        @staticmethod
        def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
            if torch.is_grad_enabled():  # the slopes would pass for constants
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
    """Compare labels by halves, and count in int32: in inductor's loops any wider mask, or sum of truths, goes number by number."""
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
    """Add the gradients of chosen rows row by row: inductor adds them number by number, each under a lock. Rows in order are the matrix."""
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
    """Make a gradient before it is added to its own transpose: else each entry, and all that leads to it, is made twice."""
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
    """A node's arguments, which are whatever its operator takes."""
    return node.args


def _turn_right_sides(graph: fx.GraphModule) -> None:
    """Copy a transposed right side of a product into rows, while it is made anyway.

    On ARM torch sends `a @ b.T` to oneDNN and all other products to BLAS, which takes half the time for a hundred rows and as
    long for seven hundred.
    """
    import torch._inductor.inductor_prims  # makes the operator known

    left: Any
    right: Any
    for product in graph.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default):
        left, right = product.args
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
