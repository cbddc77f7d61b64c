"""Third-party components, given the interface of their kind.

`spec.create` calls this module for every dotted name, such as
`pytorch_metric_learning.losses.CircleLoss(m=0.4)`. Losses and miners of pytorch-metric-learning are
converted. Any other component keeps its class, and `completed` adds the members of its kind that it
lacks. This is the only module that asks whether a component has a member.

Nothing here imports pytorch-metric-learning, so only a run that names it needs it. Its index tuples
have shapes that depend on the data: its components synchronize with the device and cannot be compiled
with `fullgraph=True`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MethodType
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from unimetric.errors import UnimetricError
from unimetric.geometry import Memory, Pairs, Triplets, as_indices, compare, euclidean, upcast_half
from unimetric.kinds import OF, Component, Loss, Miner

_ROOTS = {"losses": "BaseMetricLossFunction", "miners": "BaseMiner"}


def offer(part: Any, offered: dict[str, Any]) -> dict[str, Any]:
    """Return the run-provided arguments under the names that a third-party class uses.

    Names that its ancestors use are included.
    """
    accepted: set[str] = set()
    for ancestor in inspect.getmro(part) if inspect.isclass(part) else ():
        constructor = vars(ancestor).get("__init__")
        if inspect.isfunction(constructor):
            parameters = inspect.signature(constructor).parameters.values()
            accepted |= {parameter.name for parameter in parameters}
            if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
                break  # without **kwargs, it passes nothing on to its ancestors
    names = {"num_classes": "num_classes", "embedding_size": "dim"}
    return {theirs: offered[own] for theirs, own in names.items() if theirs in accepted and offered.get(own) is not None}


def is_module(part: Any) -> bool:
    """Return whether a class is one of torch's modules."""
    return inspect.isclass(part) and issubclass(part, nn.Module)


def completed(kind: str, component: Any) -> Any:
    """Add the members that a third-party component lacks, and return the component.

    Components of this package inherit all members and are returned unchanged. Losses and miners of
    pytorch-metric-learning are converted.

    Args:
        kind: Folder of the kind, such as `heads`.
        component: Component. For kinds that are functions, the function itself.

    Raises:
        UnimetricError: The component lacks a required attribute, uses the name of a method of its
            kind for something else, or is a class.
    """
    interface = OF[kind]
    if issubclass(interface, Component):
        if isinstance(component, interface):
            return component
        if inspect.isclass(component):
            name = component.__name__
            raise UnimetricError(f"`{name}` is a class, but one of its objects is required", f"write `{name}()`")
    if _ROOTS.get(kind) in (theirs := _peers(type(component))):
        return ForeignMiner(component) if kind == "miners" else ForeignLoss(component, proxies="WeightRegularizerMixin" in theirs)
    name = component.__name__ if inspect.isroutine(component) or inspect.isclass(component) else type(component).__name__
    for key in _REQUIRED.get(kind, ()):
        if not hasattr(component, key):
            raise UnimetricError(
                f"`{name}` cannot be one of the {kind}: it has no attribute `{key}`", f"set `self.{key}` in its constructor"
            )
    for key, default in _members(interface).items():
        default = _OWN.get((kind, key), default)
        if not hasattr(component, key):
            setattr(component, key, _attached(default, component))
        elif inspect.isfunction(default) and (isinstance(found := getattr(component, key), nn.Module) or not callable(found)):
            raise UnimetricError(f"`{name}` cannot be one of the {kind}: its `{key}` is not a method", f"rename `{key}` in `{name}`")
    if kind == "heads" and not hasattr(component, "dims"):
        component.dims = (component.dim,)
    return component


def declared(kind: str, part: Any, key: str) -> Any:
    """Return what a class or function declares before it is built, or its kind's default.

    Args:
        kind: Folder of the kind.
        part: Class or function.
        key: Name of a plain value, such as `test_time` of a head.
    """
    return getattr(part, key, getattr(OF[kind], key))


def stages_of(network: Any) -> Sequence[nn.Module]:
    """Return the modules at 1/4, 1/2 and 3/4 of a network's depth, or nothing.

    These are the first residual stages of a ResNet after its stem. In any other network that is one
    sequence of blocks, they are the blocks at these depths.
    """
    if hasattr(network, "layer4"):
        return [network.layer1, network.layer2, network.layer3]
    for name in ("blocks", "stages", "layers"):
        blocks = getattr(network, name, None)
        if isinstance(blocks, nn.Sequential | nn.ModuleList) and len(blocks):
            return [blocks[len(blocks) * quarter // 4] for quarter in (1, 2, 3)]
    return ()


#: Attributes without a default.
_REQUIRED = {"backbones": ("channels", "mean", "std"), "heads": ("dim",)}


def _members(interface: type) -> dict[str, Any]:
    """Return the members of a kind and their defaults."""
    found: dict[str, Any] = {}
    for ancestor in inspect.getmro(interface):
        if ancestor.__module__ == Component.__module__:
            own = {key: value for key, value in vars(ancestor).items() if not key.startswith(("__", "_abc", "_is_"))}
            found = own | found
    return found


def _attached(default: Any, component: Any) -> Any:
    """Return a default as an attribute of one component."""
    if inspect.isfunction(default):
        return MethodType(default, component)
    if isinstance(default, property):
        return default.__get__(component)
    return dict(default) if isinstance(default, Mapping) else default


def _network(backbone: Any) -> Any:
    """Return the attribute `network` of a third-party backbone, which adapters may extend."""
    return getattr(backbone, "network", None)


def _network_stages(backbone: Any) -> Sequence[nn.Module]:
    """Return the stages of a third-party backbone."""
    return stages_of(getattr(backbone, "network", backbone))


#: Members of third-party components that follow from their structure.
_OWN = {("backbones", "find_transformer"): _network, ("backbones", "find_stages"): _network_stages}


def build(kind: str, text: str, part: Any, arguments: dict[str, Any], miner: nn.Module | None) -> Any:
    """Build a third-party component, and convert losses and miners of pytorch-metric-learning.

    Args:
        kind: Folder of the component type.
        text: Spec string, for errors.
        part: Class of the component.
        arguments: Arguments of its constructor. `lr` is an argument of Unimetric: the learning rate
            of a loss's weights.
        miner: Miner of the run, for a loss.
    """
    theirs = _peers(part)
    if kind not in _ROOTS or not theirs:
        return completed("backbones" if kind == "adapters" else kind, part(**arguments))
    if _ROOTS[kind] not in theirs:
        raise UnimetricError(
            f"`{text}` must be one of the {kind} of pytorch-metric-learning", f"use one of `pytorch_metric_learning.{kind}`"
        )
    rate = arguments.pop("lr", 0.01) if kind == "losses" else None
    try:
        built = part(**arguments)
    except TypeError as error:
        raise UnimetricError(
            f"cannot build `{text}`: {error}", "use the arguments in the documentation of pytorch-metric-learning"
        ) from None
    if kind == "miners":
        return ForeignMiner(built)
    built.lr = rate  # the parameter groups read it from the module that holds the weights
    return ForeignLoss(built, miner=miner, proxies="WeightRegularizerMixin" in theirs)


def _peers(part: Any) -> set[str]:
    """Return the names of a class and its ancestors that are in pytorch-metric-learning."""
    ancestors = inspect.getmro(part) if inspect.isclass(part) else ()
    return {ancestor.__name__ for ancestor in ancestors if ancestor.__module__.split(".")[0] == "pytorch_metric_learning"}


class ForeignLoss(Loss):
    """Loss of pytorch-metric-learning with the interface of `kinds.Loss`.

    Reference:
        PyTorch metric learning (Musgrave et al., 2020).

    Args:
        loss: Loss of pytorch-metric-learning.
        miner: Miner of Unimetric or of pytorch-metric-learning. Without one, every pair or tuple is
            used, as in pytorch-metric-learning.
        proxies: Whether the loss compares with its weights rather than with other embeddings.
    """

    def __init__(self, loss: nn.Module, *, miner: nn.Module | None = None, proxies: bool = False) -> None:
        super().__init__()
        self.loss = loss
        self.miner = miner
        self.family = "proxy" if proxies else "pair"

    def forward(self, embeddings: Float[Tensor, "B D"], labels: Int[Tensor, "B"], memory: Memory | None = None) -> Float[Tensor, ""]:
        embeddings = upcast_half(embeddings)
        if self.family == "proxy":
            memory = None
        if self.miner is None and memory is None:
            return self.loss(embeddings, labels)
        similarity, pairs = compare(embeddings, labels, memory)
        indices = as_indices(pairs if self.miner is None else self.miner(similarity.detach(), pairs))
        if memory is None:
            return self.loss(embeddings, labels, indices)
        # Some of these losses sum over every reference, so that the empty part of the ring must be removed.
        column = memory.valid.cumsum(0) - 1
        at = (0, 2) if len(indices) == 4 else (0,)  # positions of the anchors; the rest are references
        indices = tuple(index if number in at else column[index] for number, index in enumerate(indices))
        return self.loss(embeddings, labels, indices, memory.embeddings[memory.valid].to(embeddings.dtype), memory.labels[memory.valid])


class ForeignMiner(Miner):
    """Miner of pytorch-metric-learning with the interface of `kinds.Miner`.

    It receives the distances that it requires, computed from the similarities, and labels derived
    from the masks. Pairs that it returns twice count once.

    Reference:
        PyTorch metric learning (Musgrave et al., 2020).

    Args:
        miner: Miner of pytorch-metric-learning.
    """

    def __init__(self, miner: nn.Module) -> None:
        super().__init__()
        self.miner = miner
        distance: Any = miner.distance
        known = {"CosineSimilarity", "DotProductSimilarity", "LpDistance"}
        if type(distance).__name__ not in known or not distance.normalize_embeddings or distance.p != 2:
            raise UnimetricError(
                f"a miner must use a function of the cosine similarity, but {type(miner).__name__} uses {type(distance).__name__}",
                "use a miner with the cosine or the Euclidean distance of unit vectors",
            )
        # Whether it returns pairs or triplets is tested on two classes of two images.
        twins = torch.arange(4) // 2
        same = twins[:, None] == twins
        everything = Pairs(same & ~torch.eye(4, dtype=torch.bool), ~same, torch.arange(4), 8)
        with torch.random.fork_rng(devices=[]):
            found = self._mine(torch.where(same, 0.9, 0.1), everything)
        self.gives = Pairs if len(found) == 4 else Triplets

    @torch.no_grad()
    def forward(self, similarity: Float[Tensor, "B R"], pairs: Pairs) -> Pairs | Triplets:
        found = self._mine(similarity, pairs)
        if len(found) == 4:
            return replace(pairs, positive=_mask(pairs.positive, *found[:2]), negative=_mask(pairs.negative, *found[2:]))
        anchor, positive, negative = found
        return Triplets(anchor, positive, negative, pairs.positive[anchor, positive] & pairs.negative[anchor, negative])

    def _mine(self, similarity: Float[Tensor, "B R"], pairs: Pairs) -> tuple[Tensor, ...]:
        distance: Any = self.miner.distance
        rows, columns = similarity.shape
        same = pairs.positive.scatter(1, pairs.own[:, None], True)
        # The empty part of a ring is in no pair. These miners would treat it as negatives.
        kept = (same | pairs.negative).any(0).nonzero()[:, 0]
        labels = same.int().argmax(1)
        references = torch.where(same.any(0), labels[same.int().argmax(0)], -1 - torch.arange(columns, device=labels.device))[kept]
        matrix = (similarity if distance.is_inverted else euclidean(similarity, epsilon=0.0))[:, kept] ** distance.power
        # These miners read the shape of embeddings, and their values only to compute distances.
        anchors, others = (similarity.new_zeros(()).expand(count, pairs.dim) for count in (rows, len(kept)))
        itself = rows == columns and torch.equal(pairs.own, torch.arange(columns, device=labels.device))
        called: list[bool] = []

        def known_distances(*_: Tensor) -> Tensor:
            called.append(True)
            return matrix.clone()

        distance.forward = known_distances
        try:
            found = self.miner(anchors, labels) if itself else self.miner(anchors, labels, others, references)
        finally:
            del distance.forward
        if not called:
            raise UnimetricError(
                f"a miner must read distances, but {type(self.miner).__name__} reads embeddings", "use a miner that computes distances"
            )
        at = (0, 2) if len(found) == 4 else (0,)
        return tuple(index if number in at else kept[index] for number, index in enumerate(found))


def _mask(allowed: Bool[Tensor, "B R"], rows: Int[Tensor, "P"], columns: Int[Tensor, "P"]) -> Bool[Tensor, "B R"]:
    mask = torch.zeros_like(allowed)
    mask[rows, columns] = True
    return mask & allowed
