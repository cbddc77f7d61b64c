"""Pictures to tensors: out of memory in batches on the device, or decoded by workers as they come. Both give the same squares."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from unimetric.errors import UnimetricError
from unimetric.images.boxes import Draws, center_draws, random_draws
from unimetric.images.crops import color, crop_one, plan_of, squares
from unimetric.images.pack import decode, located, opened
from unimetric.images.recipe import Recipe
from unimetric.images.table import Table
from unimetric.images.workers import block_signals, isolate_worker

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class View:
    """How to look at some pictures: at their centre, or at what an epoch's dice give.

    Args:
        recipe: the transform.
        seed: of the dice.
        epoch: of the training; `None` looks at the centre.
        view: which of several looks at the same picture; one for all, or (B,) one a row.
    """

    recipe: Recipe
    seed: int = 0
    epoch: int | None = None
    view: int | np.ndarray = 0

    def draws(self, rows: np.ndarray, sizes: np.ndarray) -> Draws:
        """What happens to each picture; colours do not depend on `sizes` (B, 2), boxes do."""
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
    progress: Progress | None = None,
) -> Resident | Streamed:
    """The pictures of a table, where they are best kept.

    Args:
        table: its paths are files, or rows of packs.
        device: where the squares are wanted.
        mean, std: of the pictures that the backbone was trained on.
        residence: `device`, `host`, `stream`; `auto` keeps packs on the device if they fit, else on the host, and streams files.
        workers: processes that decode what is streamed.
        progress: called with (done, all) while packs are read.
    """
    places = [located(path) for path in table.paths]
    packed = all(places)
    if residence in ("device", "host") and not packed:
        raise UnimetricError(f"`residence = {residence!r}` needs packed pictures", "run `unimetric pack`, or write `residence = 'stream'`")
    if residence != "stream" and packed:
        where = device if residence != "host" else torch.device("cpu")
        need = 4 * sum(int(opened(place[0]).sizes[place[1]].prod()) for place in places if place)
        if residence == "auto" and need > _free(where):
            where = torch.device("cpu")
        if residence != "auto" or need <= _free(where):
            return Resident(table, device=device, where=where, mean=mean, std=std, progress=progress)
    return Streamed(table, device=device, mean=mean, std=std, workers=workers)


def _free(where: torch.device) -> int:
    """Bytes that pictures may take: half of what is free, since the rest is for the training."""
    if where.type == "cuda":
        return torch.cuda.mem_get_info(where)[0] // 2
    for name in ("SC_AVPHYS_PAGES", "SC_PHYS_PAGES"):  # macOS knows the whole memory only, not what is free of it
        with suppress(ValueError, AttributeError):  # Windows knows neither
            return os.sysconf(name) * os.sysconf("SC_PAGE_SIZE") // 2
    return 2**31


class Resident:
    """Pictures that lie decoded in memory; a batch of crops is a few kernels.

    Args:
        table: its paths are rows of packs.
        device: where the squares are wanted.
        where: where the pixels lie: there, or on the host.
        mean, std: of the pictures that the backbone was trained on.
        progress: called with (done, all) while packs are read.
    """

    def __init__(
        self,
        table: Table,
        *,
        device: torch.device,
        where: torch.device,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        progress: Progress | None = None,
    ) -> None:
        places = [place for place in map(located, table.paths) if place]
        self.device = device
        self.sizes = np.stack([opened(file).sizes[row] for file, row in places])
        counts = self.sizes.prod(1)
        self.offsets = np.concatenate([[0], counts.cumsum()[:-1]])
        self.canvas = (int(self.sizes[:, 0].max()), int(self.sizes[:, 1].max()))
        self.pixels = torch.empty(int(counts.sum()), dtype=torch.int32, device=where)
        few = 2048  # pictures at once: the host holds no second copy of a large dataset
        for start in range(0, len(places), few):
            rows = np.arange(start, min(start + few, len(places)))
            self._read(rows, places)
            if progress is not None:
                progress(int(rows[-1]) + 1, len(places))
        self.mean, self.std = (torch.tensor(value, device=where).view(1, 3, 1, 1) for value in (mean, std))
        # On a GPU the gather, the filters and the colours become a few kernels instead of a hundred; shapes are static.
        self.make: Any = torch.compile(squares, dynamic=False) if where.type == "cuda" else squares

    def _read(self, rows: np.ndarray, places: list[tuple[str, int]]) -> None:
        for file in dict.fromkeys(places[row][0] for row in rows):
            chosen = np.array([row for row in rows if places[row][0] == file])
            flat, begins, sizes = opened(file).decoded(np.array([places[row][1] for row in chosen]))
            pixels = _whole(torch.from_numpy(flat).to(self.pixels.device))
            if (np.diff(chosen) == 1).all():  # the usual case: neighbours in the pack are neighbours here
                begin = self.offsets[chosen[0]]
                self.pixels[begin : begin + len(pixels)] = pixels
                continue
            for row, begin, size in zip(chosen, begins // 3, sizes.prod(1), strict=True):
                self.pixels[self.offsets[row] : self.offsets[row] + size] = pixels[begin : begin + size]

    def load(self, requests: Iterable[Request]) -> Iterator[Tensor]:
        """Squares (B, 3, S, S), normalised, for one request after another."""
        for rows, look in requests:
            sizes = self.sizes[rows]
            offsets, plan = self._to(self.offsets[rows]), self._to(plan_of(look.draws(rows, sizes), sizes))
            images = [
                self.make(self.pixels, offsets[part], plan[:, part], self.mean, self.std, look.recipe, self.canvas)
                for part in self._parts(len(rows))
            ]
            yield (images[0] if len(images) == 1 else torch.cat(images)).to(self.device)

    def _to(self, array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor.pin_memory().to(self.pixels.device, non_blocking=True) if self.pixels.is_cuda else tensor

    def _parts(self, count: int) -> list[slice]:
        # A batch is held at the size of the largest picture for a moment: at most some gigabytes of it on a GPU, a tenth of that here.
        most = 1_500_000_000 if self.pixels.is_cuda else 100_000_000
        pieces = -(-count * self.canvas[0] * self.canvas[1] * 3 // most)
        step = -(-count // pieces)
        return [slice(start, min(start + step, count)) for start in range(0, count, step)]


class Streamed:
    """Pictures that workers decode and crop as they are asked for.

    Args:
        table: its paths are files, or rows of packs.
        device: where the squares are wanted.
        mean, std: of the pictures that the backbone was trained on.
        workers: processes; 0 decodes in this one.
    """

    def __init__(self, table: Table, *, device: torch.device, mean: tuple[float, ...], std: tuple[float, ...], workers: int) -> None:
        self.paths, self.device, self.workers = table.paths, device, workers
        self.mean, self.std = (torch.tensor(value, device=device).view(1, 3, 1, 1) for value in (mean, std))

    def __getitem__(self, item: tuple[int, View]) -> Tensor | UnimetricError:
        row, look = item
        try:
            picture = decode(self.paths[row])
        except UnimetricError as error:
            return error  # raised where the run is, without a worker's traceback
        draws = look.draws(np.array([row]), np.array([picture.shape[:2]]))
        return crop_one(picture, draws, look.recipe)

    def load(self, requests: Iterable[Request]) -> Iterator[Tensor]:
        """Squares (B, 3, S, S), normalised, for one request after another."""
        asked: list[Request] = []  # what the loader has taken, and has not given yet

        def batches() -> Iterator[list[tuple[int, View]]]:
            for rows, look in requests:
                asked.append((rows, look))
                views = np.broadcast_to(look.view, len(rows))
                yield [(int(row), replace(look, view=int(view))) for row, view in zip(rows, views, strict=True)]

        loader: Any = DataLoader(
            self,  # type: ignore[arg-type]
            batch_sampler=batches(),
            num_workers=self.workers,
            collate_fn=_stack,
            worker_init_fn=isolate_worker,
            pin_memory=self.device.type == "cuda",
            generator=torch.Generator(),  # a loader draws when it starts, and a run that goes on starts one more: not from the model's dice
        )
        with block_signals():
            arriving = iter(loader)  # its workers start here
        for images in arriving:
            if isinstance(images, UnimetricError):
                raise images
            rows, look = asked.pop(0)
            ones = np.ones((len(rows), 2))  # the boxes are cut already, and neither mirrors nor colours depend on sizes
            plan = torch.from_numpy(plan_of(look.draws(rows, ones), ones)).to(self.device)
            images = images.to(self.device, non_blocking=True)
            images = torch.where(plan[10, :, None, None, None] > 0, images.flip(-1), images)
            yield color(images, plan, self.mean, self.std, look.recipe)


def _whole(flat: Tensor) -> Tensor:
    """Three bytes a pixel to one int32, where they lie: a GPU does it in no time, two cores need seconds for a dataset."""
    padded = torch.zeros(len(flat) // 3, 4, dtype=torch.uint8, device=flat.device)
    padded[:, :3] = flat.view(-1, 3)
    return padded.view(torch.int32).view(-1)


def _stack(items: list[Tensor | UnimetricError]) -> Tensor | UnimetricError:
    for item in items:
        if isinstance(item, UnimetricError):
            return item
    return torch.stack([item for item in items if isinstance(item, Tensor)])


def find_bad(table: Table, *, workers: int = 2, progress: Progress | None = None) -> list[tuple[int, str]]:
    """Decode every picture once; the rows that cannot be read, and why."""
    from concurrent.futures import ThreadPoolExecutor

    def problem(path: str) -> str:
        try:
            decode(path)
        except UnimetricError as error:
            return error.message
        return ""

    bad = []
    with ThreadPoolExecutor(max(1, workers)) as pool:
        for row, reason in enumerate(pool.map(problem, table.paths)):
            if reason:
                bad.append((row, reason))
            if progress is not None:
                progress(row + 1, len(table))
    return bad
