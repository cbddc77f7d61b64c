"""Unit vectors whose inner products rank like the geometry of a model.

Stores compare unit vectors. Cosine needs nothing else. In the other geometries of `Space`, a score is an inner
product of other coordinates of the query and of the gallery item (`Space.sides`). Gallery coordinates are divided by a
scale and get one more entry, which makes their length 1; that entry is 0 in queries. Center and scale are computed from
the first images of an index and never change, because they apply to all its vectors.

N images, D dimensions of the model, E of the store, K neighbors.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from unimetric.geometry.space import scale_to_unit

#: Entries that are added to the points of a geometry.
_EXTRA = {"cosine": 0, "inner": 1, "euclidean": 2, "poincare": 3}
#: Largest length of later points, as a multiple of the largest length among the first ones.
_MARGIN = 4.0


@dataclass(frozen=True)
class Placement:
    """Map from points of a geometry to unit vectors of a store.

    Args:
        geometry: `cosine`, `inner`, `euclidean` or `poincare`.
        curvature: Curvature of the Poincaré ball.
        center: (D,) origin of the points. Empty for the zero vector.
        scale: Length of the gallery coordinates that become unit vectors. 0 if not known yet.
    """

    geometry: str = "cosine"
    curvature: float = 0.1
    center: tuple[float, ...] = ()
    scale: float = 0.0

    def extended(self, dim: int) -> int:
        """Return the dimension of the store for points of D dimensions."""
        return dim + _EXTRA[self.geometry]

    @property
    def frozen(self) -> bool:
        """Whether center and scale are known. Cosine has none."""
        return self.geometry == "cosine" or self.scale > 0

    def fitted(self, points: Float[Tensor, "N D"]) -> Placement:
        """Return the placement with center and scale of the first points of an index."""
        if self.frozen:
            return self
        points = points.double()
        center = tuple(points.mean(0).tolist()) if self.geometry == "euclidean" else ()
        known = Placement(self.geometry, self.curvature, center, 1.0)
        longest = float(known._gallery(points).norm(dim=1).max())
        return Placement(self.geometry, self.curvature, center, _MARGIN * max(longest, 1e-12))

    def _shift(self, points: Float[Tensor, "N D"]) -> Float[Tensor, "N D"]:
        return points.double() - points.new_tensor(self.center, dtype=torch.float64) if self.center else points.double()

    def _gallery(self, points: Float[Tensor, "N D"]) -> Float[Tensor, "N E"]:
        """Return the coordinates of gallery items, before they get the last entry."""
        points = self._shift(points)
        square = points.square().sum(1, keepdim=True)
        if self.geometry == "euclidean":
            return torch.cat([points, -square / 2], 1)
        if self.geometry == "poincare":
            factor = 1 / (1 - self.curvature * square)
            return torch.cat([points * factor, factor, square * factor], 1)
        return points

    def vectors(self, points: Float[Tensor, "N D"]) -> tuple[Float[np.ndarray, "N E"], Bool[np.ndarray, "N"]]:
        """Return unit vectors to store, and which points have one.

        Zero vectors have no direction, and points far outside the first ones exceed the scale.
        """
        if self.geometry == "cosine":
            unit = scale_to_unit(points.float())
            return unit.cpu().numpy(), (points.isfinite().all(1) & points.any(1)).cpu().numpy()
        scaled = self._gallery(points) / self.scale
        rest = 1 - scaled.square().sum(1, keepdim=True)
        valid = (rest[:, 0] >= 0) & points.isfinite().all(1)
        unit = torch.cat([scaled, rest.clamp_min(0).sqrt()], 1)
        return unit.float().cpu().numpy(), valid.cpu().numpy()

    def queries(self, points: Float[Tensor, "N D"]) -> Float[np.ndarray, "N E"]:
        """Return unit vectors to search with."""
        if self.geometry == "cosine":
            return scale_to_unit(points.float()).cpu().numpy()
        points = self._shift(points)
        one = torch.ones(len(points), 1, dtype=points.dtype, device=points.device)
        if self.geometry == "euclidean":
            points = torch.cat([points, one], 1)
        elif self.geometry == "poincare":
            points = torch.cat([2 * points, -points.square().sum(1, keepdim=True), -one], 1)
        return scale_to_unit(torch.cat([points, 0 * one], 1)).float().cpu().numpy()

    def points(self, vectors: Float[np.ndarray, "N E"]) -> Float[np.ndarray, "N D"]:
        """Return the points of stored vectors; unit vectors for the cosine."""
        if self.geometry == "cosine":
            return vectors
        wide = np.asarray(vectors, np.float64)[:, :-1] * self.scale
        if self.geometry == "poincare":
            wide = wide[:, :-2] / wide[:, -2:-1]
        elif self.geometry == "euclidean":
            wide = wide[:, :-1] + np.array(self.center)
        return wide.astype(np.float32)

    def scores(self, query: Float[Tensor, "D"], found: Float[np.ndarray, "K E"]) -> Float[np.ndarray, "K"]:
        """Return the scores of stored vectors for a query: inner product, or minus the distance.

        Args:
            query: Point of the geometry.
            found: Stored vectors.
        """
        x = query.double().cpu().numpy()
        y = self.points(found).astype(np.float64)
        if self.geometry in ("inner", "cosine"):
            return (y @ x).astype(np.float32)
        square = ((y - x) ** 2).sum(1)
        if self.geometry == "euclidean":
            return -np.sqrt(square).astype(np.float32)
        inside = (1 - self.curvature * x @ x) * (1 - self.curvature * (y**2).sum(1))
        return (-np.arccosh(1 + 2 * self.curvature * square / inside) / self.curvature**0.5).astype(np.float32)
