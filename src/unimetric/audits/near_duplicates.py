"""Groups of images that show the same pixels."""

from __future__ import annotations

import hashlib
from contextlib import closing
from typing import Annotated

import numpy as np
from PIL import Image
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components

from unimetric.arguments import Count, Range
from unimetric.images.pack import count_cores, map_in_order
from unimetric.kinds import Audited, Findings, Group

#: Pixels of the side of a descriptor, and of the image that it is computed from.
_SIDE, _LARGE = 16, 96
#: Parts of an image that a copy may show: fraction of each side, and position.
_BOXES = [(x * (1 - size), y * (1 - size), size) for size in (1.0, 0.9, 0.8, 0.7) for x in (0, 0.5, 1) for y in (0, 0.5, 1)][8:]
#: Correlation of a part on this grid from which its position is searched exactly.
_COARSE = 0.7


def near_duplicates(
    gallery: Audited, *, neighbors: Count = 4, near: Annotated[float, Range(above=0, most=1)] = 0.93, column: str = "split"
) -> Findings:
    """Images that are copies of others: resized, compressed again, mirrored or cropped.

    Candidates are nearest neighbors of the embeddings. A pair is reported if the gray values of one image correlate with those of the
    other, of its mirror image, or of a part of it with at least 70 % of each side. Images of one color are
    copies if all pixels are equal.

    Reference:
        Candidates by embeddings as in A self-supervised descriptor for image copy detection (Pizzi et al., CVPR
        2022); normalized correlation (Lewis, Vision Interface 1995).

    Args:
        gallery: Images.
        neighbors: Number of neighbors of each image that are compared with it.
        near: Correlation from which two images are copies.
        column: Column whose values should not share copies, such as the split of a dataset.
    """
    title = "Near-duplicates"
    note = "Groups of copies: resized, compressed again, mirrored or cropped. Keep one of each group."
    pairs = _candidates(gallery, neighbors)
    smalls = _read(gallery, np.unique(pairs)) if len(pairs) else {}
    found = []
    for number, (one, other) in enumerate(pairs):
        if one in smalls and other in smalls:
            score = compare(smalls[one], smalls[other])
            if score >= near:
                found.append((one, other, score))
        gallery.progress("comparing", number + 1, len(pairs))
    if not found:
        return Findings(title, note)
    size = len(gallery.ids)
    links = coo_matrix((np.ones(len(found)), ([one for one, _, _ in found], [other for _, other, _ in found])), (size, size))
    group_of = connected_components(links, directed=False)[1]
    best: dict[int, float] = {}
    for one, other, score in found:
        for row in (one, other):
            best[row] = max(best.get(row, 0.0), score)
    members: dict[int, list[int]] = {}
    for row in sorted(best):
        members.setdefault(int(group_of[row]), []).append(row)
    parts = gallery.columns.get(column)
    groups, table = [], []
    for number, rows in enumerate(sorted(members.values(), key=lambda each: (-len(each), each[0]))):
        across = parts is not None and len({parts[row] for row in rows}) > 1
        values = [f"{column} {parts[row]}" if parts is not None else "" for row in rows]
        groups.append(
            Group(f"{len(rows)} copies" + (f", in more than one {column}" if across else ""), [gallery.ids[r] for r in rows], values)
        )
        for row in rows:
            table.append({"group": number, "id": gallery.ids[row], "correlation": round(best[row], 4), f"several {column}s": across})
    crossing = sum("more than one" in group.caption for group in groups)
    return Findings(title, note + (f" {crossing} groups are in more than one {column}." if crossing else ""), groups, table)


def _candidates(gallery: Audited, neighbors: int) -> np.ndarray:
    """Return the (P, 2) pairs of nearest neighbors, each once."""
    count = min(neighbors, len(gallery.ids) - 1)
    if count < 1:
        return np.zeros((0, 2), np.int64)
    near = gallery.space.neighbors(count).numpy()
    pairs = np.stack([np.repeat(np.arange(len(near)), count), near.ravel()], 1)
    pairs = np.sort(pairs[pairs[:, 1] >= 0], 1)
    return np.unique(pairs, axis=0)


class Small:
    """Descriptors of an image.

    Args:
        pixels: (H, W, 3) or (H, W) pixels.
    """

    def __init__(self, pixels: np.ndarray) -> None:
        self.digest = hashlib.sha256(pixels.tobytes() + str(pixels.shape).encode()).digest()
        self.image = Image.fromarray(pixels).convert("L").resize((_LARGE, _LARGE), Image.Resampling.BOX)
        self.mirrored = self.image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        self.parts = np.stack([describe(self.image, *box) for box in _BOXES])
        self.whole = np.stack([self.parts[0], describe(self.mirrored, 0, 0, 1)])


def describe(image: Image.Image, x: float, y: float, size: float) -> np.ndarray:
    """Return the gray values of a part of an image as a unit vector (256,) with mean 0."""
    box = (x * _LARGE, y * _LARGE, (x + size) * _LARGE, (y + size) * _LARGE)
    values = np.asarray(image.resize((_SIDE, _SIDE), Image.Resampling.BOX, box), np.float32).ravel()
    values = values - values.mean()
    norm = float(np.linalg.norm(values))
    return values / norm if norm > 1e-3 * _SIDE else np.zeros_like(values)


def compare(one: Small, other: Small) -> float:
    """Return the largest correlation of an image with another, its mirror image, or a part."""
    best = float(one.digest == other.digest)  # plain images have no correlation
    for whole, parted in ((one, other), (other, one)):
        scores = whole.whole @ parted.parts.T  # mirrored or not, by part
        best = max(best, float(scores.max()))
        for mirrored in (0, 1):
            part = int(scores[mirrored].argmax())
            if _COARSE <= scores[mirrored, part] < 0.99:
                best = max(best, _refine(whole.whole[mirrored], parted.image, _BOXES[part], float(scores[mirrored, part])))
    return best


def _refine(target: np.ndarray, image: Image.Image, box: tuple[float, float, float], score: float) -> float:
    """Move and resize a part while its correlation grows."""
    step = 0.05
    while step > 0.01:
        moves = [(dx * step, dy * step, ds * step) for dx in (-1, 0, 1) for dy in (-1, 0, 1) for ds in (-1, 0, 1)]
        improved = False
        for move in moves:
            size = min(1.0, max(0.65, box[2] + move[2]))
            x, y = (min(1 - size, max(0.0, at + by)) for at, by in zip(box[:2], move[:2], strict=True))
            value = float(describe(image, x, y, size) @ target)
            if value > score + 1e-4:
                score, best, improved = value, (x, y, size), True
        if improved:
            box = best
        else:
            step /= 2
    return score


def _read(gallery: Audited, rows: np.ndarray) -> dict[int, Small]:
    """Return the descriptors of images. Those that cannot be read any more are skipped."""

    def read(row: int) -> Small | None:
        pixels = gallery.read(gallery.ids[row])
        return None if pixels is None else Small(pixels)

    found: dict[int, Small] = {}
    with closing(map_in_order(read, [int(row) for row in rows], count_cores())) as results:
        for number, (row, small) in enumerate(zip(rows, results, strict=True)):
            if small is not None:
                found[int(row)] = small
            gallery.progress("reading", number + 1, len(rows))
    return found
