"""Embed a stream of image files.

Workers read and crop, and the network runs on batches of one shape. Unlike a run's loader, this one needs no table,
keeps nothing of earlier images, and reports an image that cannot be read instead of stopping. Crops and colors are
computed by the code of training.

B images of a batch, S pixels of a side, D dimensions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from PIL import Image, ImageOps
from torch import Tensor
from torch.utils.data import DataLoader

from unimetric.arguments import local_path
from unimetric.config import RunConfig
from unimetric.deploy.facts import Facts
from unimetric.errors import DAMAGED_INDEX, UnimetricError
from unimetric.images.boxes import Draws, center_draws
from unimetric.images.crops import color, crop_one, plan_of
from unimetric.images.decode import MOST_PIXELS, parse_image, read_bytes, to_rgb
from unimetric.images.loading import View
from unimetric.images.pack import decode, located
from unimetric.images.regions import split_box
from unimetric.images.remote import Unreachable
from unimetric.images.workers import isolate_worker, start_workers
from unimetric.runs.device import evaluation_batch, open_fabric, set_up
from unimetric.runs.exported import Exported, format_of, open_exported
from unimetric.runs.folder import open_run, overridden
from unimetric.runs.weights import hash_tensors
from unimetric.spec import create

#: Images that a process reads at a time. A whole batch of a GPU takes seconds, in which the GPU and other processes would wait.
_CHUNK = 64


@dataclass(frozen=True)
class Reading:
    """Result of reading a file.

    Args:
        digest: Digest of its content; None if the file could not be opened.
        problem: Why it could not be read. Empty if it could.
        embedded: Whether it has an embedding. An image with the expected digest has none.
    """

    digest: bytes | None
    problem: str = ""
    embedded: bool = False


#: Readings of some files, and the crops (B, 3, S, S) of those that have one.
Chunk = tuple[list[Reading | Unreachable], Tensor]


class Embedder:
    """A model on its device, with the crops of its test images.

    Args:
        config: Settings of the run: transform, device, precision, batch.
        model: Model of `build_model`.
    """

    def __init__(self, config: RunConfig, model: Any) -> None:
        self._fabric, self._given = open_fabric(config), model
        self.device, self.batch, self.dim = self._fabric.device, evaluation_batch(config, self._fabric), int(model.dim)
        self.view = View(create("transforms", config.transform))

    @cached_property
    def model(self) -> Any:
        """Network on its device.

        It is moved at the first use, when the processes that read images have started.
        """
        with torch.inference_mode(False):  # else the parameters could never be changed again
            return set_up(self._fabric, self._given).eval()

    @cached_property
    def mean(self) -> Tensor:
        """(1, 3, 1, 1) mean of the backbone's pretraining images."""
        return torch.tensor(self._given.mean, device=self.device).view(1, 3, 1, 1)

    @cached_property
    def std(self) -> Tensor:
        """(1, 3, 1, 1) standard deviation of the backbone's pretraining images."""
        return torch.tensor(self._given.std, device=self.device).view(1, 3, 1, 1)

    @cached_property
    def _plan(self) -> Float[Tensor, "16 1"]:
        """Colors of a center crop, the same for all images.

        A copy per batch would wait for the GPU.
        """
        one = np.ones((1, 2))
        return torch.from_numpy(plan_of(self.view.draws(np.zeros(1, np.int64), one), one)).to(self.device)

    @torch.inference_mode()
    def embed(self, crops: Tensor) -> Float[Tensor, "B D"]:
        """Return the raw embeddings of crops (B, 3, S, S) uint8, in float32."""
        images = crops.to(self.device, non_blocking=True)
        return self.model(color(images, self._plan, self.mean, self.std, self.view.recipe))[0].float()

    def embed_images(self, images: Sequence[Any]) -> Float[np.ndarray, "N D"]:
        """Return the raw embeddings of images.

        Args:
            images: Paths, images of Pillow, or arrays (H, W, 3) or (H, W) of uint8.
        """
        crops = [crop_center(to_array(image), self.view, name_of(image)) for image in images]
        found = [self.embed(torch.stack(crops[start : start + self.batch])) for start in range(0, len(crops), self.batch)]
        return torch.cat(found).cpu().numpy() if found else np.zeros((0, self.dim), np.float32)

    def stream(self, items: Iterable[tuple[str, bytes | None]], *, workers: int) -> Iterator[tuple[list[Reading], Float[Tensor, "B D"]]]:
        """Yield the readings of each batch of files, and the embeddings of those that have one.

        The network always runs on full batches, so that the embedding of an image does not depend on the number of images.

        Args:
            items: Path of each image, and the digest of a content that need not be embedded again.
            workers: Number of processes that read and crop. 0 reads in this process.
        """
        return self.embed_chunks(self.read(items, workers=workers))

    def read(self, items: Iterable[tuple[str, bytes | None]], *, workers: int) -> Iterator[Chunk]:
        """Start to read files, and return the parts of batches as they arrive. See `stream`."""
        parts = -(-self.batch // _CHUNK) if workers else 1
        loader: Any = DataLoader(
            _Reader(self.view),  # type: ignore[arg-type]
            batch_sampler=_split(items, self.batch, parts),
            num_workers=workers,
            prefetch_factor=2 * parts if workers else None,  # two batches
            collate_fn=_collate,
            worker_init_fn=isolate_worker,
            pin_memory=self.device.type == "cuda",
            generator=torch.Generator(),
        )
        return start_workers(loader)

    def embed_chunks(self, chunks: Iterable[Chunk]) -> Iterator[tuple[list[Reading], Float[Tensor, "B D"]]]:
        """Embed what `read` returns. See `stream`."""
        readings: list[Reading] = []
        parts: list[Tensor] = []
        for some, crops in chunks:
            for each in some:
                if isinstance(each, Unreachable):
                    raise each
                readings.append(each)
            if len(crops):
                parts.append(crops.to(self.device, non_blocking=True))
            if len(readings) == self.batch:
                yield readings, self._embed_parts(parts)
                readings, parts = [], []
        if readings:
            yield readings, self._embed_parts(parts)

    def _embed_parts(self, parts: list[Tensor]) -> Float[Tensor, "B D"]:
        """Embed crops in a full batch, which repeats them if there are too few."""
        if not parts:
            return torch.zeros(0, self.dim)
        crops = parts[0] if len(parts) == 1 else torch.cat(parts)
        full = crops if len(crops) == self.batch else crops[torch.arange(self.batch, device=self.device) % len(crops)]
        return self.embed(full)[: len(crops)]


class _Square(View):
    """Square of a resized image that contains its center crop; one side for all images.

    A file resizes and crops images itself, but only images of one size form a batch. In this square, it resizes nothing and crops
    the same pixels as in the whole image.
    """

    def draws(self, rows: np.ndarray, sizes: np.ndarray) -> Draws:
        whole = center_draws(self.recipe, sizes)
        inner = center_draws(self.recipe, np.full((1, 2), self.recipe.resize))
        side = np.full(len(sizes), float(self.recipe.resize))
        return replace(whole, top=whole.top - inner.top, left=whole.left - inner.left, box_height=side, box_width=side)


class ExportedEmbedder(Embedder):
    """The model of an exported file, which runs without torch.

    Args:
        config: Settings of the run: transform, batch.
        model: Model of `open_exported`.
    """

    def __init__(self, config: RunConfig, model: Exported) -> None:
        recipe = create("transforms", config.transform)
        if recipe.size > recipe.resize:
            raise UnimetricError(
                f"{model.path}: its crop ({recipe.size} pixels) is larger than the resized image ({recipe.resize})",
                "build the index from the run folder",
            )
        self.model, self.view, self.dim = model, _Square(recipe), model.dim
        self.device, self.batch = torch.device("cpu"), config.evaluate_batch or 32
        try:  # the first pass also allocates memory, so no query waits for that
            shape = self.embed(torch.zeros(1, 3, recipe.resize, recipe.resize, dtype=torch.uint8)).shape
        except Exception as error:  # onnxruntime raises many types
            raise UnimetricError(f"{model.path}: cannot be run: {str(error)[:200]}", "export the run again") from None
        if shape != (1, self.dim):
            raise UnimetricError(f"{model.path}: its output must be (1, {self.dim}), got {tuple(shape)}", "export the run again")

    def embed(self, crops: Tensor) -> Float[Tensor, "B D"]:
        """Return the raw embeddings of squares (B, 3, S, S) uint8, in float32."""
        return torch.from_numpy(self.model.function(np.ascontiguousarray(crops.permute(0, 2, 3, 1).numpy()))).float()


def open_embedder(config: RunConfig, model: Any) -> Embedder:
    """Return the embedder of a model of `build_model`, or of an exported file."""
    return ExportedEmbedder(config, model) if isinstance(model, Exported) else Embedder(config, model)


def weights_of(model: Any) -> str:
    """Return the hash that identifies a model."""
    return model.digest if isinstance(model, Exported) else hash_tensors(model.state_dict()).hex()


def open_own(path: Path, facts: Facts, settings: Mapping[str, Any]) -> tuple[RunConfig, Any]:
    """Return settings and model of an index.

    Args:
        path: Index folder.
        facts: Content of its `index.toml`.
        settings: Settings of this machine, such as `device`.
    """
    own = path / facts.model
    config, model = open_exported(own) if format_of(own) else open_run(own)
    if weights_of(model) != facts.weights:
        raise UnimetricError(f"{own}: is not the model that has built the index", DAMAGED_INDEX)
    return overridden(config, dict(settings), own), model


def _split(items: Iterable[tuple[str, bytes | None]], batch: int, parts: int) -> Iterator[list[tuple[str, bytes | None]]]:
    """Yield the items of each batch in parts of almost the same size."""
    items = iter(items)
    while True:
        for part in range(parts):
            some = list(islice(items, (part + 1) * batch // parts - part * batch // parts))
            if not some:
                return
            yield some


class _Reader:
    """Dataset whose items are (path, known digest)."""

    def __init__(self, view: View) -> None:
        self.view = view

    def __getitem__(self, item: tuple[str, bytes | None]) -> tuple[Reading | Unreachable, Tensor | None]:
        path, known = item
        digest = None
        try:
            if located(path):
                array = decode(path)
                digest = digest_of(array.tobytes())
            else:
                data = read_bytes(path)
                digest = digest_of(data)
            if digest == known:
                return Reading(digest), None
            if not located(path):
                array = np.array(parse_image(data, path, split_box(path)[1])[0])
            return Reading(digest, embedded=True), crop_center(array, self.view, path)
        except Unreachable as error:
            return error, None  # raised in the main process; the image is not unreadable
        except UnimetricError as error:
            return Reading(digest, error.message.removeprefix(f"{path}: ")), None


def _collate(items: list[tuple[Reading | Unreachable, Tensor | None]]) -> Chunk:
    crops = [crop for _, crop in items if crop is not None]
    return [reading for reading, _ in items], torch.stack(crops) if crops else torch.zeros(0, dtype=torch.uint8)


def digest_of(data: bytes) -> bytes:
    """Return eight bytes that identify the content of a file."""
    return hashlib.blake2b(data, digest_size=8).digest()


def crop_center(array: np.ndarray, view: View, name: str) -> Tensor:
    """Return the center crop (3, S, S) of an image (H, W, 3) uint8, as in an evaluation.

    Args:
        array: Pixels.
        view: View of the test images.
        name: Name of the image, for the error.

    Raises:
        UnimetricError: The image is so narrow that resizing its short side takes more memory than the largest image.
    """
    height, width = array.shape[:2]
    if view.recipe.resize**2 * max(height, width) > MOST_PIXELS * min(height, width):
        raise UnimetricError(f"{name}: an image of {width} x {height} pixels is too narrow to be resized", "crop it first")
    draws = view.draws(np.zeros(1, np.int64), np.array([(height, width)]))
    return crop_one(array, draws, view.recipe)


def name_of(image: Any) -> str:
    """Return a name of an image for errors."""
    return str(image) if isinstance(image, str | Path) else "the image"


def to_array(image: Any) -> np.ndarray:
    """Return the pixels (H, W, 3) uint8 of a file, an image of Pillow, or an array.

    Args:
        image: Path, image of Pillow, or array (H, W, 3) or (H, W) of uint8.
    """
    if isinstance(image, str | Path):
        path = local_path(str(image))
        if located(path):
            return decode(path)
        return np.array(parse_image(_read_query(path), path, split_box(path)[1], hint="search with another image")[0])
    if isinstance(image, Image.Image):
        return np.array(to_rgb(ImageOps.exif_transpose(image), "the image", "search with another image"))
    array = np.asarray(image)
    if array.ndim == 2:
        array = np.repeat(array[:, :, None], 3, 2)
    if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] != 3 or not array.size:
        raise UnimetricError(
            f"an image must be an array (H, W, 3) of uint8, got {array.dtype} {array.shape}", "convert it, or pass the path of a file"
        )
    return np.require(array, requirements=["C", "W"])  # torch warns about arrays that cannot be written, as those of Pillow


def _read_query(path: str) -> bytes:
    try:
        return read_bytes(path)
    except UnimetricError as error:
        raise UnimetricError(error.message, "name an image file") from None
