"""Load images as tensors: in batches from memory, or decoded by workers on demand.

The memory is that of the device or of the host. Both return the same crops of packed images.
"""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from unimetric.errors import UnimetricError
from unimetric.images.boxes import Draws, center_draws, random_draws
from unimetric.images.crops import canvas_of, color, crop_one, plan_of, squares
from unimetric.images.decoded import decoded_copy
from unimetric.images.pack import decode, located, map_in_order, opened
from unimetric.images.recipe import Recipe
from unimetric.images.remote import Unreachable
from unimetric.images.table import Table
from unimetric.images.workers import isolate_worker, start_workers

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class View:
    """View of an image: its center crop, or the random crop of an epoch.

    Args:
        recipe: Transform.
        seed: Seed of the random crops.
        epoch: Training epoch. `None` selects the center crop.
        view: Number of the augmented view of the same image. One for all rows, or (B,) one per row.
    """

    recipe: Recipe
    seed: int = 0
    epoch: int | None = None
    view: int | np.ndarray = 0

    def draws(self, rows: np.ndarray, sizes: np.ndarray) -> Draws:
        """Return the draws of each image. Colors do not depend on `sizes` (B, 2); boxes do."""
        if self.epoch is None:
            return center_draws(self.recipe, sizes)
        return random_draws(self.recipe, sizes, rows, seed=self.seed, epoch=self.epoch, view=self.view)


Request = tuple[np.ndarray, View]


def open_pictures(
    table: Table,
    *,
    device: torch.device,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    residence: str = "auto",
    workers: int = 2,
    compiled: bool = False,
    progress: Progress | None = None,
) -> Resident | Streamed:
    """Open the images of a table in the most suitable memory.

    Args:
        table: Table whose paths are files, or rows of packs.
        device: Device of the crops.
        mean, std: Normalization constants of the backbone's pretraining images.
        residence: `device`, `host` or `stream`. `auto` stores packs on the device if they fit, else
            on the host, and streams files.
        workers: Number of processes that decode streamed images.
        compiled: Whether to compile the crops of images in the memory of a GPU. It takes seconds, so it pays only in long runs.
        progress: Function called with (done, total) while packs are read.
    """
    locations = [located(path) for path in table.paths]
    packed = all(locations)
    if residence in ("device", "host") and not packed:
        raise UnimetricError(f"`residence = {residence!r}` requires packed images", "run `unimetric pack`, or set `residence = 'stream'`")
    if residence != "stream" and packed:
        where = device if residence != "host" else torch.device("cpu")
        need = 4 * sum(int(opened(location[0]).sizes[location[1]].prod()) for location in locations if location)
        if residence == "auto" and need > _free(where):
            where = torch.device("cpu")
        if residence != "auto" or need <= _free(where):
            # A CPU takes longer to train than to decode, so that a copy would only cost disk space.
            copied = device.type != "cpu"
            return Resident(table, device=device, where=where, mean=mean, std=std, copied=copied, compiled=compiled, progress=progress)
    return Streamed(table, device=device, mean=mean, std=std, workers=workers)


def _free(where: torch.device) -> int:
    """Return the bytes available for images: half of the free memory.

    The rest is for training.
    """
    if where.type == "cuda":
        return torch.cuda.mem_get_info(where)[0] // 2
    for name in ("SC_AVPHYS_PAGES", "SC_PHYS_PAGES"):  # macOS reports only the total memory
        with suppress(ValueError, AttributeError):  # Windows reports neither
            return os.sysconf(name) * os.sysconf("SC_PAGE_SIZE") // 2
    return 2**31


#: Pixels of an image that is large for a CPU.
_LARGE = 1 << 21


def uneven(sizes: np.ndarray) -> bool:
    """Return whether a few images are much larger than the others, by their sizes (N, 2)."""
    return bool(sizes.max(0).prod() > 4 * sizes.prod(1).mean())


class Cropper:
    """Cropping of packed images in batches.

    Both loaders use it, so that their crops of a pack are bit-identical on a CPU.

    Args:
        table: Table whose paths are rows of packs.
        where: Device of the pixels.
        mean, std: Normalization constants of the backbone's pretraining images.
        compiled: Whether to compile the cropping. Requires that all calls have the same shapes.
    """

    def __init__(
        self, table: Table, *, where: torch.device, mean: tuple[float, ...], std: tuple[float, ...], compiled: bool = False
    ) -> None:
        self.sizes = np.stack([opened(file).sizes[row] for file, row in filter(None, map(located, table.paths))])
        self._canvases: dict[tuple[str, bool], tuple[int, int]] = {}
        self.where = where
        self.mean, self.std = (torch.tensor(value, device=where).view(1, 3, 1, 1) for value in (mean, std))
        self.make: Any = squares
        if compiled:
            # Every dataset, size of a batch and transform has a graph of its own. `training.capture` raises the limit of their number.
            self.make = torch.compile(squares, dynamic=False)

    def crop(self, pixels: Tensor, starts: np.ndarray, rows: np.ndarray, view: View) -> Tensor:
        """Return normalized crops (B, 3, S, S).

        Args:
            pixels: Pixels of all images, concatenated, four bytes each.
            starts: (B,) start of each image of the batch.
            rows: (B,) indices of the images in the table.
            view: Center crop or augmented view.
        """
        sizes = self.sizes[rows]
        offsets, plan = (to_device(each, self.where) for each in (starts, plan_of(view.draws(rows, sizes), sizes)))
        canvas = self._canvas(view)
        images = [
            self.make(pixels, offsets[part], plan[:, part], self.mean, self.std, view.recipe, canvas)
            for part in self._parts(len(rows), canvas)
        ]
        return images[0] if len(images) == 1 else torch.cat(images)

    def _canvas(self, view: View) -> tuple[int, int]:
        random = view.epoch is not None
        key = repr(view.recipe), random  # as text, because a recipe of a plugin may contain lists
        if key not in self._canvases:
            self._canvases[key] = canvas_of(view.recipe, self.sizes, random=random)
        return self._canvases[key]

    def _parts(self, count: int, canvas: tuple[int, int]) -> list[slice]:
        # A batch is temporarily padded to the canvas. Limit that to some gigabytes on a GPU, where crops that are not compiled store
        # it several times, and to a tenth of that on a CPU.
        most = 100_000_000 if self.where.type == "cpu" else 300_000_000 if self.make is squares else 1_500_000_000
        pieces = -(-count * canvas[0] * canvas[1] * 3 // most)
        step = -(-count // pieces)
        return [slice(start, min(start + step, count)) for start in range(0, count, step)]


class Resident:
    """Images decoded in memory. A batch of crops takes a few kernels.

    Args:
        table: Table whose paths are rows of packs.
        device: Device of the crops.
        where: Device of the pixels: the same, or the host.
        mean, std: Normalization constants of the backbone's pretraining images.
        copied: Whether to read `decoded_copy` of the packs.
        compiled: Whether to compile the crops if the pixels are on a GPU.
        progress: Function called with (done, total) while packs are read.
    """

    workers = 0

    def __init__(
        self,
        table: Table,
        *,
        device: torch.device,
        where: torch.device,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        copied: bool = False,
        compiled: bool = False,
        progress: Progress | None = None,
    ) -> None:
        locations = [location for location in map(located, table.paths) if location]
        self.device = device
        # On a GPU, compiling fuses the gather, the filters and the colors from about a hundred kernels
        # into a few. Shapes are static.
        self.cropper = Cropper(table, where=where, mean=mean, std=std, compiled=compiled and where.type == "cuda")
        # On a CPU, a canvas for images of many megapixels takes gigabytes and seconds per batch.
        sizes = self.cropper.sizes
        self.single = where.type == "cpu" and uneven(sizes) and sizes.prod(1).max() > _LARGE
        counts = sizes.prod(1)
        self.offsets = np.concatenate([[0], counts.cumsum()[:-1]])
        self.pixels = torch.empty(int(counts.sum()), dtype=torch.int32, device=where)
        files = Counter(file for file, _ in locations)
        self._packs = {
            file: decoded_copy(opened(file), count, progress=progress) if copied else opened(file) for file, count in files.items()
        }
        few = 2048  # images at once, so that the host never holds a second copy of a large dataset
        for start in range(0, len(locations), few):
            rows = np.arange(start, min(start + few, len(locations)))
            self._read(rows, locations)
            if progress is not None:
                progress(int(rows[-1]) + 1, len(locations))

    @property
    def arithmetic(self) -> str:
        """Device that crops. Another one rounds differently; single crops are rounded to bytes."""
        return "crops by workers" if self.single else f"crops by the {self.cropper.where.type}"

    def _read(self, rows: np.ndarray, locations: list[tuple[str, int]]) -> None:
        for file in dict.fromkeys(locations[row][0] for row in rows):
            chosen = np.array([row for row in rows if locations[row][0] == file])
            flat, begins, sizes = self._packs[file].decoded(np.array([locations[row][1] for row in chosen]))
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # and is not written to
                pixels = _pack_pixels(torch.from_numpy(flat).to(self.pixels.device))
            if (np.diff(chosen) == 1).all():  # the usual case: the images are consecutive in the pack
                begin = self.offsets[chosen[0]]
                self.pixels[begin : begin + len(pixels)] = pixels
                continue
            for row, begin, size in zip(chosen, begins // 3, sizes.prod(1), strict=True):
                self.pixels[self.offsets[row] : self.offsets[row] + size] = pixels[begin : begin + size]

    def load(self, requests: Iterable[Request]) -> Iterator[Tensor]:
        """Yield normalized crops (B, 3, S, S), one batch per request."""
        for rows, view in requests:
            if not self.single:
                yield self.cropper.crop(self.pixels, self.offsets[rows], rows, view).to(self.device)
                continue
            numbers = np.broadcast_to(view.view, len(rows))
            crops = [self._crop(row, replace(view, view=int(number))) for row, number in zip(rows, numbers, strict=True)]
            mean, std = (each.to(self.device) for each in (self.cropper.mean, self.cropper.std))
            yield finish_crops(torch.stack(crops).to(self.device), rows, view, mean, std)

    def _crop(self, row: int, view: View) -> Tensor:
        """Crop an image as workers do."""
        start, size = self.offsets[row], self.cropper.sizes[row]
        pixels = self.pixels[start : start + size.prod()].view(torch.uint8).view(*size.tolist(), 4)
        return crop_one(pixels.numpy()[..., :3], view.draws(np.array([row]), size[None]), view.recipe)


class Streamed:
    """Images that workers decode on demand.

    Workers also crop files. Packed images are cropped like those in memory.

    Args:
        table: Table whose paths are files, or rows of packs.
        device: Device of the crops.
        mean, std: Normalization constants of the backbone's pretraining images.
        workers: Number of processes. 0 decodes in the main process.
    """

    def __init__(self, table: Table, *, device: torch.device, mean: tuple[float, ...], std: tuple[float, ...], workers: int) -> None:
        self.paths, self.device, self.workers = table.paths, device, workers
        self.mean, self.std = (torch.tensor(value, device=device).view(1, 3, 1, 1) for value in (mean, std))
        self.cropper: Cropper | None = None
        if table.paths and all(map(located, table.paths)):
            # Not compiled: the number of pixels differs from batch to batch.
            cropper = Cropper(table, where=device, mean=mean, std=std)
            # Workers crop if a few images are much larger than the others. The canvas no longer grows with these, but the crops of
            # existing runs must stay rounded as they are.
            if not uneven(cropper.sizes):
                self.cropper = cropper

    @property
    def arithmetic(self) -> str:
        """Device that crops. Another one rounds differently; workers round to bytes."""
        return "crops by workers" if self.cropper is None else f"crops by the {self.device.type}"

    def __getitem__(self, item: tuple[int, View]) -> Tensor | UnimetricError:
        row, view = item
        try:
            image = decode(self.paths[row])
        except UnimetricError as error:
            return error  # raised in the main process, without the traceback of a worker
        if self.cropper is not None:
            return torch.from_numpy(image).reshape(-1)
        draws = view.draws(np.array([row]), np.array([image.shape[:2]]))
        return crop_one(image, draws, view.recipe)

    def load(self, requests: Iterable[Request]) -> Iterator[Tensor]:
        """Yield normalized crops (B, 3, S, S), one batch per request."""
        pending: list[Request] = []  # requests that the loader has taken but not returned yet

        def batches() -> Iterator[list[tuple[int, View]]]:
            for rows, view in requests:
                pending.append((rows, view))
                numbers = np.broadcast_to(view.view, len(rows))
                yield [(int(row), replace(view, view=int(number))) for row, number in zip(rows, numbers, strict=True)]

        loader: Any = DataLoader(
            self,  # type: ignore[arg-type]
            batch_sampler=batches(),
            num_workers=self.workers,
            collate_fn=partial(_collate, torch.stack if self.cropper is None else torch.cat),
            worker_init_fn=isolate_worker,
            pin_memory=self.device.type == "cuda",
            # A loader draws when it starts, and a resumed run starts one more. A separate generator keeps
            # these draws out of the model's.
            generator=torch.Generator(),
        )
        for images in start_workers(loader):
            if isinstance(images, UnimetricError):
                raise images
            rows, view = pending.pop(0)
            images = images.to(self.device, non_blocking=True)
            if self.cropper is not None:
                counts = self.cropper.sizes[rows].prod(1)
                yield self.cropper.crop(_pack_pixels(images), counts.cumsum() - counts, rows, view)
                continue
            yield finish_crops(images, rows, view, self.mean, self.std)


def finish_crops(images: Tensor, rows: np.ndarray, view: View, mean: Tensor, std: Tensor) -> Tensor:
    """Flip, color and normalize crops of workers, on the device of the crops.

    Args:
        images: (B, 3, S, S) uint8 crops of `crop_one`.
        rows: (B,) indices of the images, which set the random colors of a view.
        view: Center crop or augmented view.
        mean, std: Normalization constants of the backbone's pretraining images, (1, 3, 1, 1) each.
    """
    ones = np.ones((len(rows), 2))  # workers have cropped already, and neither flips nor colors depend on sizes
    plan = to_device(plan_of(view.draws(rows, ones), ones), images.device)
    images = torch.where(plan[10, :, None, None, None] > 0, images.flip(-1), images)
    return color(images, plan, mean, std, view.recipe)


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Copy an array to a device, without synchronizing with a GPU."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def _pack_pixels(flat: Tensor) -> Tensor:
    """Pack the three bytes of each pixel into one int32, on their device.

    This is fast on a GPU, while two cores need seconds for a dataset.
    """
    padded = torch.zeros(len(flat) // 3, 4, dtype=torch.uint8, device=flat.device)
    padded[:, :3] = flat.view(-1, 3)
    return padded.view(torch.int32).view(-1)


def _collate(join: Callable[[Any], Tensor], items: list[Tensor | UnimetricError]) -> Tensor | UnimetricError:
    return next((item for item in items if isinstance(item, UnimetricError)), None) or join(items)


def find_bad(table: Table, *, workers: int = 2, progress: Progress | None = None) -> list[tuple[int, str]]:
    """Decode every image once, and return the unreadable rows with the reasons."""

    def problem(path: str) -> str:
        try:
            decode(path)
        except Unreachable:
            raise
        except UnimetricError as error:
            return error.message.removeprefix(f"{path}: ")
        return ""

    bad = []
    with closing(map_in_order(problem, table.paths, max(1, workers))) as reasons:
        for row, reason in enumerate(reasons):
            if reason:
                bad.append((row, reason))
            if progress is not None:
                progress(row + 1, len(table))
    return bad
