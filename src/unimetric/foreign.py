"""Losses and miners of pytorch-metric-learning, given our shape: `loss = "pytorch_metric_learning.losses.CircleLoss(m=0.4)"`.

The one on-ramp from outside. `spec.create` comes here with every dotted name; what is not of pytorch-metric-learning passes untouched.
Nothing here imports that package, so that only a run that names it needs it. Its index tuples have shapes that depend on the data:
these parts wait for the device and do not capture with `fullgraph=True`.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from unimetric.errors import UnimetricError
from unimetric.geometry import Memory, Pairs, Triplets, compare, euclidean, upcast_half

_ROOTS = {"losses": "BaseMetricLossFunction", "miners": "BaseMiner"}


def offer(part: Any, offered: dict[str, Any]) -> dict[str, Any]:
    """What a run offers, under the names that a class from outside or one of its ancestors asks for it."""
    asked: set[str] = set()
    for ancestor in inspect.getmro(part) if inspect.isclass(part) else ():
        if inspect.isfunction(constructor := vars(ancestor).get("__init__")):
            parameters = inspect.signature(constructor).parameters.values()
            asked |= {parameter.name for parameter in parameters}
            if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
                break  # it hands nothing on to its ancestors
    names = {"num_classes": "num_classes", "embedding_size": "dim"}
    return {theirs: offered[ours] for theirs, ours in names.items() if theirs in asked and offered.get(ours) is not None}


def build(kind: str, text: str, part: Any, arguments: dict[str, Any], miner: nn.Module | None) -> Any:
    """Build a part from outside, and give it our shape if it is of pytorch-metric-learning, or inherits from it.

    Args:
        kind: the folder that a part of ours would lie in.
        text: what the user wrote, for errors.
        part: the class.
        arguments: of its constructor; `lr` is ours, the learning rate of a loss's own weights.
        miner: the run's miner, for a loss.
    """
    ancestors = inspect.getmro(part) if inspect.isclass(part) else ()
    theirs = {ancestor.__name__ for ancestor in ancestors if ancestor.__module__.split(".")[0] == "pytorch_metric_learning"}
    if kind not in _ROOTS or not theirs:
        return part(**arguments)
    if _ROOTS[kind] not in theirs:
        raise UnimetricError(f"`{text}` is not one of pytorch-metric-learning's {kind}", f"name one of `pytorch_metric_learning.{kind}`")
    rate = arguments.pop("lr", 0.01) if kind == "losses" else None
    try:
        built = part(**arguments)
    except TypeError as error:
        raise UnimetricError(
            f"cannot build `{text}`: {error}", "its arguments are those of pytorch-metric-learning's documentation"
        ) from None
    if kind == "miners":
        return ForeignMiner(built)
    built.lr = rate  # where the engine looks for it: on the module that holds the weights
    return ForeignLoss(built, miner=miner, proxies="WeightRegularizerMixin" in theirs)


class ForeignLoss(nn.Module):
    """A loss of pytorch-metric-learning (Musgrave et al., 2020) as one of ours: `loss(embeddings, labels, memory=None)`.

    Args:
        loss: theirs.
        miner: ours or theirs; without one, every pair or tuple, as in pytorch-metric-learning.
        proxies: whether it compares with weights of its own, rather than with other embeddings.
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
        indices = _tuple(pairs if self.miner is None else self.miner(similarity.detach(), pairs))
        if memory is None:
            return self.loss(embeddings, labels, indices)
        # Some of theirs sum over every reference, so that the empty part of the ring must not be there.
        place = memory.valid.cumsum(0) - 1
        at = (0, 2) if len(indices) == 4 else (0,)  # where anchors stand; the rest are references
        indices = tuple(index if number in at else place[index] for number, index in enumerate(indices))
        return self.loss(embeddings, labels, indices, memory.embeddings[memory.valid].to(embeddings.dtype), memory.labels[memory.valid])


class ForeignMiner(nn.Module):
    """A miner of pytorch-metric-learning (Musgrave et al., 2020) as one of ours: `miner(similarity, pairs) -> Pairs | Triplets`.

    It is handed the distances it asks for, made of our similarities, and labels made of our masks. Pairs that it names twice count once.

    Args:
        miner: theirs.
    """

    def __init__(self, miner: nn.Module) -> None:
        super().__init__()
        self.miner = miner
        distance: Any = miner.distance
        known = {"CosineSimilarity", "DotProductSimilarity", "LpDistance"}
        if type(distance).__name__ not in known or not distance.normalize_embeddings or distance.p != 2:
            raise UnimetricError(
                f"the miner {type(miner).__name__} measures by {type(distance).__name__}, which does not follow from cosine similarity",
                "use one that measures by the cosine or the Euclidean distance of unit vectors",
            )
        # What it gives is seen by trying, on two classes of two.
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
        # The empty part of a ring is in no pair; their miners would take it for negatives.
        kept = (same | pairs.negative).any(0).nonzero()[:, 0]
        labels = same.int().argmax(1)
        references = torch.where(same.any(0), labels[same.int().argmax(0)], -1 - torch.arange(columns, device=labels.device))[kept]
        matrix = (similarity if distance.is_inverted else euclidean(similarity, epsilon=0.0))[:, kept] ** distance.power
        # They read the shape of embeddings, and their values only to measure.
        stand_in, stand_in_too = (similarity.new_zeros(()).expand(count, pairs.dim) for count in (rows, len(kept)))
        itself = rows == columns and torch.equal(pairs.own, torch.arange(columns, device=labels.device))
        asked: list[bool] = []

        def measured(*_: Tensor) -> Tensor:
            asked.append(True)
            return matrix.clone()

        distance.forward = measured
        try:
            found = self.miner(stand_in, labels) if itself else self.miner(stand_in, labels, stand_in_too, references)
        finally:
            del distance.forward
        if not asked:
            raise UnimetricError(
                f"the miner {type(self.miner).__name__} reads embeddings rather than their distances", "use one that measures distances"
            )
        at = (0, 2) if len(found) == 4 else (0,)
        return tuple(index if number in at else kept[index] for number, index in enumerate(found))


def _tuple(mined: Pairs | Triplets) -> tuple[Tensor, ...]:
    if isinstance(mined, Pairs):
        return *mined.positive.nonzero(as_tuple=True), *mined.negative.nonzero(as_tuple=True)
    return mined.anchor[mined.valid], mined.positive[mined.valid], mined.negative[mined.valid]


def _mask(allowed: Bool[Tensor, "B R"], rows: Int[Tensor, "P"], columns: Int[Tensor, "P"]) -> Bool[Tensor, "B R"]:
    mask = torch.zeros_like(allowed)
    mask[rows, columns] = True
    return mask & allowed
