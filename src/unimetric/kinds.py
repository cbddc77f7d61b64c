"""One class per kind of component: its interface, with a default for everything optional.

A component inherits from the class of its kind and overrides what it needs. Callers use every member
without asking whether it exists. Third-party components need no base class:
`unimetric.foreign.completed` adds the members that they lack.

Losses, miners, objectives, samplers, backbones, heads, stores and formats are classes. The other kinds are functions,
and their interface is a protocol. Shapes use B for the batch, D for the embedding dimension, R for
references (the batch or a memory), N for positions and C for channels.

Defaults are methods or plain values, never modules: `nn.Module` does not find a submodule behind a
class attribute of the same name.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Protocol

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from unimetric.arguments import Function, checked
from unimetric.errors import UnimetricError
from unimetric.geometry import Pairs, Triplets, as_indices, compare, upcast_half
from unimetric.geometry.space import Space
from unimetric.images.recipe import Recipe
from unimetric.images.table import Split, Table


@dataclass(frozen=True)
class Output:
    """Output of a model for one batch, in float32.

    Args:
        embeddings: (B, D) raw embeddings, not normalized.
        tokens: (B, 1 + N, C) tokens of the backbone: the summary of each image, then the positions
            of the last stage.
        images: (B, 3, H, W) input of the backbone.
        branches: Outputs of the head, (B, D_i) each: the embeddings alone, or the parts that are
            joined to the embeddings.
        views: Further augmented views of the same images, (B, 3, H, W) each.
    """

    embeddings: Float[Tensor, "B D"]
    tokens: Float[Tensor, "B N C"]
    images: Float[Tensor, "B 3 H W"]
    branches: tuple[Tensor, ...] = ()
    views: tuple[Tensor, ...] = ()

    @property
    def features(self) -> Float[Tensor, "B C"]:
        """Return the summary token of each image."""
        return self.tokens[:, 0]


# --- Components that are classes -----------------------------------------------------------------


class Component:
    """Component of any kind that is a class.

    The keyword arguments of its constructor are checked.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__init__" in vars(cls):
            cls.__init__ = checked(vars(cls)["__init__"], name=cls.__name__)  # type: ignore[method-assign]


class Loss(Component, nn.Module):
    """Loss of a batch: `loss(embeddings (B, D), labels (B,), memory=None) -> scalar`.

    A loss with trained parameters may set `lr` and `group` in its constructor.
    """

    family: Literal["pair", "tuple", "proxy"] = "pair"
    reads: tuple[type, ...] = ()  # what its miner may return: Pairs, Triplets; empty if it has no miner
    default_miner: str = ""
    needs_triplets: str = ""  # argument, also an attribute, with which the loss reads triplets only
    lr: float | None = None  # learning rate of its parameters; None for the run's
    group: Mapping[str, Any] = MappingProxyType({})  # other options of its parameter group
    num_classes: int | None = None  # labels must be below, if it has parameters of each class

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "forward" in vars(cls):
            cls.forward = _check_batch(vars(cls)["forward"])

    def placed(self, embeddings: Float[Tensor, "N D"]) -> tuple[Float[Tensor, "N D"], dict[str, Any]]:
        """Return the points to search for neighbors, and the options of the `Space` they are in."""
        return embeddings, {"geometry": "cosine"}


def _check_batch(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Let a loss reject batches that do not fit, and show embeddings that are not finite."""

    @functools.wraps(forward)
    def call(self: Loss, embeddings: Tensor, labels: Tensor, *others: Any, **named: Any) -> Tensor:
        labels = _fitting(embeddings, labels)
        # Reading a label from a GPU would wait for it.
        if self.num_classes is not None and labels.device.type == "cpu" and not torch.compiler.is_compiling():
            low, high = (int(each) for each in labels.aminmax())
            if low < 0 or high >= self.num_classes:
                hint = "check `num_classes` of the loss, or number the classes from 0"
                raise UnimetricError(f"labels must be from 0 to {self.num_classes - 1}, got {low} to {high}", hint)
        with full_precision(embeddings):
            # Miners skip embeddings that are not finite. The loss of a diverged model would be 0.
            return forward(self, embeddings, labels, *others, **named) + 0 * embeddings.detach().sum(dtype=torch.float32)

    return call


def full_precision(embeddings: Tensor) -> AbstractContextManager[Any]:
    """Return a context without autocast, which would round similarities to half precision.

    In float16, inner products of raw embeddings would overflow.
    """
    device = embeddings.device.type
    enabled = device != "meta" and torch.is_autocast_enabled(device)  # which is an error for meta
    return torch.autocast(device, enabled=False) if enabled else nullcontext()


def _fitting(embeddings: Tensor, labels: Tensor) -> Tensor:
    """Return labels as int64, and raise an error unless they fit the embeddings."""
    if not isinstance(embeddings, Tensor) or not embeddings.is_floating_point():
        kind = embeddings.dtype if isinstance(embeddings, Tensor) else type(embeddings).__name__
        raise UnimetricError(f"embeddings must be a tensor of floats, got {kind}", "use `torch.as_tensor(embeddings).float()`")
    if not isinstance(labels, Tensor) or labels.is_floating_point():
        kind = labels.dtype if isinstance(labels, Tensor) else type(labels).__name__
        raise UnimetricError(f"labels must be a tensor of integers, got {kind}", "use `torch.as_tensor(labels).long()`")
    if embeddings.ndim != 2 or labels.shape != embeddings.shape[:1] or not len(labels):
        shapes = f"{tuple(embeddings.shape)} and {tuple(labels.shape)}"
        raise UnimetricError(f"embeddings and labels must have the shapes (B, D) and (B,), B at least 1, got {shapes}", "check the batch")
    return labels.long()


class Miner(Component, nn.Module):
    """Selection of pairs or triplets: `miner(similarity (B, R), pairs) -> Pairs | Triplets`.

    In other loops, `miner(embeddings (B, D), labels (B,))` returns a tuple of index tensors, as in
    pytorch-metric-learning: anchors, positives and negatives, or anchors and positives, then anchors
    and negatives.
    """

    gives: type[Pairs] | type[Triplets] = Triplets

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "forward" in vars(cls):
            cls.forward = _accept_labels(vars(cls)["forward"])


def _accept_labels(forward: Callable[..., Pairs | Triplets]) -> Callable[..., Any]:
    """Let a miner's `forward` accept embeddings and labels, too."""

    @functools.wraps(forward)
    def mine(self: Miner, similarity: Tensor, pairs: Pairs | Tensor) -> Pairs | Triplets | tuple[Tensor, ...]:
        if isinstance(pairs, Pairs):
            return forward(self, similarity, pairs)
        labels = _fitting(similarity, pairs)
        with torch.no_grad(), full_precision(similarity):
            return as_indices(forward(self, *compare(upcast_half(similarity), labels)))

    return mine


class Objective(Component, nn.Module):
    """Terms that a run minimizes: `objective(output, labels) -> {"name": term}`.

    The state of an objective is in `state_dict()` and `optimizers`, so that a resumed run continues
    exactly. A module inside an objective may set three attributes that `groups` reads: `lr`, its
    learning rate; `group`, other options of its parameter group; and `own_step = True` if one of
    `optimizers` updates it.
    """

    views: int = 1  # augmented views per image; those after the first are in `output.views`
    reads: tuple[str, ...] = ()  # "tokens", "images": what several devices gather besides the embeddings
    one_pass: bool = True  # whether a step calls the model once, so that a CUDA graph may overwrite its outputs afterwards
    whole_batch: bool = False  # whether it changes the forward pass of the model in a way that depends on the whole batch
    optimizers: Mapping[str, torch.optim.Optimizer] = MappingProxyType({})  # its own by name; it steps them

    def meet(self, model: Any) -> None:
        """Receive the model once, before anything moves to the device."""

    def begin(self) -> None:
        """Prepare a step. Called before each forward pass, outside the compiler."""

    def forward_pass(self, model: Any, images: Float[Tensor, "B 3 H W"]) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """Return the embeddings, tokens and branches of a batch.

        Args:
            model: Model of the run.
            images: This rank's slice of the batch.
        """
        return model(images)

    def backward_pass(self, loss: Float[Tensor, ""], backward: Callable[[Tensor], None]) -> None:
        """Compute the gradients of all trained parameters.

        Args:
            loss: Sum of the terms.
            backward: Backward pass in the precision of the run. It takes the place of `loss.backward()`.
        """
        backward(loss)

    def stepped(self) -> None:
        """Finish a step.

        Called after each optimizer step, outside the compiler and without gradient.
        """

    def groups(self, lr: float) -> list[dict[str, Any]]:
        """Return the parameter groups of the objective for the run's optimizer.

        The weight decay is 0 unless `group` sets it, as in Roth et al. 2020. Modules with the same
        options share a group, because each group costs a round of kernel launches at every step.

        Args:
            lr: Learning rate of the run, for modules that set none.
        """
        alike: dict[str, dict[str, Any]] = {}
        separate = {id(weight) for module in self.modules() if getattr(module, "own_step", False) for weight in module.parameters()}
        for name, module in self.named_modules():
            weights = [weight for weight in module.parameters(recurse=False) if weight.requires_grad and id(weight) not in separate]
            if not weights:
                continue
            rate = getattr(module, "lr", None)
            options = {"lr": lr if rate is None else rate, "weight_decay": 0.0, **getattr(module, "group", {})}
            key = repr(sorted(options.items()))
            alike.setdefault(key, {"name": name or "objective", "params": [], **options})["params"] += weights
        return list(alike.values())


class Sampler(Component):
    """Rows of every batch, the same on every rank and after every restart.

    A subclass sets `steps` and defines `plan`. The batches of an epoch depend on the seed and on
    `epoch` alone, so they are read in any order.
    """

    needs_embeddings: bool = False
    epoch: int = 0
    steps: int  # batches per epoch
    _plan: tuple[int, Int[np.ndarray, "steps B"]] | None = None  # epoch, and its batches

    def plan(self) -> Int[np.ndarray, "steps B"]:
        """Return the rows of all batches of `self.epoch`."""
        raise NotImplementedError

    def batch(self, step: int) -> Int[np.ndarray, "B"]:
        """Return the rows of a batch of `self.epoch`."""
        if self._plan is None or self._plan[0] != self.epoch:
            self._plan = self.epoch, self.plan()
        return self._plan[1][step].copy()

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch. Lightning and other loops call this method of a `DataLoader`'s sampler."""
        self.epoch = epoch

    @property
    def sampler(self) -> Sampler:
        """This sampler. Of a batch sampler, Lightning calls `set_epoch` of this attribute only."""
        return self

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[Int[np.ndarray, "B"]]:
        return (self.batch(step) for step in range(len(self)))

    def fill(self, embeddings: Float[Tensor, "N D"]) -> None:
        """Store the embeddings of all training rows. Called once, before the first step."""

    def refresh(self, rows: Int[np.ndarray, "B"], embeddings: Float[Tensor, "B D"]) -> None:
        """Replace the embeddings of a batch. Called after each step, with the batch of all ranks."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state for a checkpoint."""
        return {}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore the state from a checkpoint."""


class EmbeddedSampler(Sampler):
    """Sampler that reads the embeddings of the training set.

    A subclass sets `bank` (`samplers/_bank.py`), which stores the embeddings and selects the batches.
    """

    needs_embeddings: bool = True
    bank: Any

    def batch(self, step: int) -> Int[np.ndarray, "B"]:
        return self.bank.batch(self.epoch, step)

    def __len__(self) -> int:
        return self.bank.steps

    def fill(self, embeddings: Float[Tensor, "N D"]) -> None:
        self.bank.fill(embeddings)

    def refresh(self, rows: Int[np.ndarray, "B"], embeddings: Float[Tensor, "B D"]) -> None:
        self.bank.refresh(rows, embeddings)

    def state_dict(self) -> dict[str, Tensor]:
        return self.bank.state_dict()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.bank.load_state_dict(state)


class Backbone(Component, nn.Module):
    """Feature extractor: `backbone(images (B, 3, H, W)) -> tokens (B, 1 + N, C)`.

    The first token is the global token. A subclass sets `channels` (C) and the `mean` and `std` of the pixels
    it expects.
    """

    channels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    pool_size: int = 0  # number of prompts in its pool

    # These two are not called `transformer` and `stages`, which are frequent names of submodules.
    def find_transformer(self) -> Any:
        """Return the vision transformer that adapters extend, or None."""
        return None

    def find_stages(self) -> Sequence[nn.Module]:
        """Return the three modules at a quarter, half and three quarters of the depth, or nothing."""
        return ()

    def preference(self, images: Float[Tensor, "B 3 H W"]) -> Float[Tensor, "B M"]:
        """Return the weight of each of the `pool_size` prompts for each image."""
        return images.new_zeros(len(images), 0)

    def merged(self) -> Any:
        """Return the backbone with inserted parameters multiplied into its weights where possible."""
        return self


class Head(Component, nn.Module):
    """Embedding of a backbone's tokens: `head(tokens (B, 1 + N, C)) -> (B, D)`.

    A head may have several branches, each with its own loss. It then overrides `branches` and `join`.

    Args:
        dim: Embedding dimension D.
        dims: Dimensions of the branches. Defaults to the embedding alone.
    """

    test_time: tuple[str, ...] = ()  # arguments that act only at test time; `evaluate` may change them
    dim: int
    dims: tuple[int, ...]

    def __init__(self, dim: int, dims: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.dim, self.dims = dim, dims or (dim,)

    @property
    def prototype_sets(self) -> tuple[Float[Tensor, "K L"], ...]:
        """Return every distinct set of trained prototypes."""
        return ()

    def start_prototypes(self, tokens: Float[Tensor, "B N C"]) -> None:
        """Set the prototypes to cluster centers of the positions of a batch."""

    def branches(self, tokens: Float[Tensor, "B N C"]) -> tuple[Tensor, ...]:
        """Return the outputs of the branches, (B, D_i) each."""
        return (self(tokens),)

    def join(self, branches: tuple[Tensor, ...]) -> Float[Tensor, "B D"]:
        """Return the embeddings that are made of the branches."""
        return branches[0]

    def groups(self, lr: float) -> list[dict[str, Any]]:
        """Return the parameter groups of the head for the run's optimizer.

        Args:
            lr: Learning rate of the head.
        """
        weights = [weight for weight in self.parameters() if weight.requires_grad]
        return [{"name": "head", "params": weights, "lr": lr}] if weights else []

    def variants(self, embeddings: Float[Tensor, "B D"]) -> dict[str, Float[Tensor, "B D"]]:
        """Return other embeddings to evaluate, by name, computed from the head's own."""
        return {}

    def maps(self, tokens: Float[Tensor, "B N C"]) -> Float[Tensor, "B K N"]:
        """Return the weight of every prototype at every position."""
        return tokens.new_zeros(len(tokens), 0, tokens.shape[1] - 1)


class Store(Component):
    """Unit vectors (float32) under string ids, with columns of text, numbers or truth values.

    `create("stores", "flat", path=folder, dim=D)` opens the store of an index, or creates it. The other
    arguments are its settings. Similarity is the inner product. A missing value of a column is None.

    `write` and `delete` are durable: what they have returned from survives a kill, and a killed call has
    happened as a whole or not at all. Ids, vectors and columns are checked by `stores._points`.
    """

    report: Mapping[str, Any] = MappingProxyType({})  # what `finish` has measured, as literals

    @property
    def columns(self) -> Mapping[str, type]:
        """Return the type of each column: str, int, float or bool."""
        raise NotImplementedError

    def write(self, ids: Sequence[str], vectors: Float[np.ndarray, "N D"], columns: Mapping[str, Sequence[Any]]) -> None:
        """Add points, or replace those whose ids exist, with all their columns.

        A column that is new is missing in all earlier points. A column of missing values alone is not
        created.

        Args:
            ids: Unique, nonempty ids.
            vectors: Unit vectors.
            columns: Values of each column, in the order of the ids.
        """
        raise NotImplementedError

    def delete(self, ids: Sequence[str]) -> None:
        """Remove points. Unknown ids are ignored."""
        raise NotImplementedError

    def search(self, queries: Float[np.ndarray, "Q D"], k: int, where: Any = None) -> tuple[np.ndarray, Float[np.ndarray, "Q k"]]:
        """Return the ids and similarities of the k nearest points of each query, best first.

        Args:
            queries: Unit vectors.
            k: Number of points per query. If fewer match, the id "" and the score -inf fill the rest.
            where: Filter: text such as `price < 50`, a dictionary such as `{"price": {"<": 50}}`, or None.

        Returns:
            Arrays of ids (str) and scores (float32), (Q, k) each.
        """
        raise NotImplementedError

    def fetch(self, ids: Sequence[str]) -> dict[str, list[Any]]:
        """Return all columns of some points, in the order of the ids. Unknown ids are errors."""
        raise NotImplementedError

    def vectors(self, ids: Sequence[str]) -> Float[np.ndarray, "N D"]:
        """Return the vectors of some points, in the order of the ids. Unknown ids are errors."""
        raise NotImplementedError

    def scan(self, batch: int = 4096) -> Iterator[tuple[list[str], Float[np.ndarray, "N D"], dict[str, list[Any]]]]:
        """Yield the ids, vectors and columns of all points in bounded memory, in a stable order.

        Args:
            batch: Largest number of points at a time.
        """
        raise NotImplementedError

    def __len__(self) -> int:
        raise NotImplementedError

    def finish(self) -> None:
        """Compact the store, build and tune its index, and fill `report`, after the last write."""

    def close(self) -> None:
        """Release files and connections."""


#: Function of a format: uint8 images (B, H, W, 3) of one size -> embeddings (B, D).
Embed = Callable[[np.ndarray], np.ndarray]
#: Function that returns an iterator over training images, (1, H, W, 3) each.
Images = Callable[[], Iterator[np.ndarray]]
#: Function that measures a converted model, and returns notes.
Check = Callable[[Embed], dict[str, Any]]


class Format(Component):
    """File or folder with a whole model: uint8 images (B, H, W, 3) -> (B, D) in float32.

    `model` is a module with that input and output (`runs.exported.Exportable`), in evaluation mode on the
    CPU. Its attribute `model` has the backbone and the head; `recipe`, `mean` and `std` describe the crop.
    """

    suffix: str = ""  # of its file; empty for a folder
    calibrated: bool = False  # whether it reads training images
    rounds: bool = False  # whether its numbers are less precise than the model's
    described: bool = False  # whether it has a model card, with intervals of the metrics

    def write(self, model: Any, path: Path, *, notes: dict[str, Any], images: Images, check: Check) -> None:
        """Convert a model, and write it with its notes.

        Args:
            model: Module that embeds images.
            path: File or folder. Nothing exists there.
            notes: Run id, settings, metrics and threshold: literals that a reader gets back.
            images: Function that returns an iterator over training images, (1, H, W, 3) each.
            check: Function that is called with the converted model before it is saved. It returns
                further notes, or raises an error that stops the export.
        """
        raise NotImplementedError

    def read(self, path: Path) -> tuple[Embed, dict[str, Any]]:
        """Return the model of a file or folder, and its notes. No code of the file is executed."""
        raise NotImplementedError


# --- Components that are functions: parameters before the `*` are their input -----------------------


class Metric(Protocol):
    """Number, or several by name, that describes a `Space`.

    Declared by the decorator `metric`.
    """

    better: Literal["higher", "lower", "neither"] = "higher"

    def depth(self, space: Space, **arguments: Any) -> int:
        """Return the number of neighbors per query that the metric reads; 0 for none."""
        return 0

    def check(self, space: Space, **arguments: Any) -> None:
        """Raise an error if labels, queries and gallery do not suffice. Reads no embedding."""

    def __call__(self, space: Space) -> float | dict[str, float]: ...


@dataclass(frozen=True)
class Audited:
    """Gallery that an audit reads.

    Args:
        space: N points in the geometry of their model. All are queries and gallery items.
        ids: Their ids.
        labels: Class of each image; None if it has none.
        columns: Values of each column.
        read: Function from an id to the pixels (H, W, 3) uint8, or None if the image cannot be read.
        progress: Callback with (name of a step, finished items, all items).
    """

    space: Space
    ids: Sequence[str]
    labels: Sequence[Any]
    columns: Mapping[str, Sequence[Any]]
    read: Callable[[str], np.ndarray | None]
    progress: Callable[[str, int, int], None] = lambda name, done, total: None


@dataclass(frozen=True)
class Group:
    """Images of one finding.

    Args:
        caption: Text above the images.
        ids: Ids of the images.
        names: Text below each image.
    """

    caption: str
    ids: Sequence[str]
    names: Sequence[str]


@dataclass(frozen=True)
class Findings:
    """Groups of images that an audit reports, most important first.

    Args:
        title: Heading.
        note: Meaning of the findings, and what to do.
        groups: Images of each finding.
        rows: Rows of the csv file, all with the same keys.
    """

    title: str
    note: str
    groups: Sequence[Group] = ()
    rows: Sequence[Mapping[str, Any]] = ()


class Audit(Protocol):
    """Search for images of a gallery that a person should see."""

    def __call__(self, gallery: Audited) -> Findings: ...


class Dataset(Protocol):
    """Table of images with labels."""

    def __call__(self) -> Table: ...


class Partition(Protocol):
    """Split of a table into training, validation and test rows."""

    def __call__(self, table: Table) -> Split: ...


class Transform(Protocol):
    """Recipe of crops and colors. `images/` executes it."""

    def __call__(self) -> Recipe: ...


class Adapter(Protocol):
    """Frozen backbone with inserted parameters, the only trainable ones."""

    def __call__(self, backbone: Any) -> Any: ...


class Optimizer(Protocol):
    """Optimizer of torch."""

    def __call__(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer: ...


class Schedule(Protocol):
    """Factor on the learning rates at a fractional epoch."""

    def __call__(self, progress: float, epochs: int) -> float: ...


def metric(
    *,
    better: Literal["higher", "lower", "neither"] = "higher",
    depth: Callable[..., int] | None = None,
    needs: Callable[..., object] | None = None,
) -> Callable[[Function], Function]:
    """Declare a metric: better values, the number of neighbors it reads, and what it needs.

    >>> @metric(depth=lambda space, k: k)
    ... def hits(space, *, k=1): ...
    >>> hits.better, hits.depth(None), hits.depth(None, k=4)
    ('higher', 1, 4)

    Args:
        better: Values that are better: `higher`, `lower`, or `neither` if the metric describes a
            space without a judgment. It then cannot select an epoch.
        depth: Function of the space and all arguments of the metric that returns the number of
            neighbors per query that it reads. Omit it if the metric reads none.
        needs: Function of the space and all arguments of the metric that raises an error if labels, queries
            and gallery do not suffice. Omit it if the metric needs no more than a match of some query, and that
            only if it reads neighbors.
    """

    def declare(function: Function) -> Function:
        signature = inspect.signature(function)

        def pass_all(called: Callable[..., Any], space: Space, arguments: dict[str, Any]) -> Any:
            given = signature.bind(space, **arguments)
            given.apply_defaults()
            return called(*given.args, **given.kwargs)

        def read(space: Space, **arguments: Any) -> int:
            return 0 if depth is None else pass_all(depth, space, arguments)

        def check(space: Space, **arguments: Any) -> None:
            if needs is not None:
                pass_all(needs, space, arguments)
            elif depth is not None:
                space.check_matches()

        declared: Any = function
        declared.better, declared.depth, declared.check = better, read, check
        return function

    return declare


#: The class or protocol of each folder of components. `spec.KINDS` lists the folders.
OF: dict[str, type] = {
    "adapters": Adapter,
    "audits": Audit,
    "backbones": Backbone,
    "datasets": Dataset,
    "formats": Format,
    "heads": Head,
    "losses": Loss,
    "metrics": Metric,
    "miners": Miner,
    "objectives": Objective,
    "optimizers": Optimizer,
    "samplers": Sampler,
    "schedules": Schedule,
    "splits": Partition,
    "stores": Store,
    "transforms": Transform,
}
