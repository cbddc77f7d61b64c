"""Exact error rates at thresholds on the scores of all pairs, in bounded memory.

A pair is a query and a gallery item.

A pair is genuine if both images are of one class, and an impostor otherwise. It is accepted if its
score exceeds a threshold. Scores are those of `Space.neighbors`: larger is nearer.

One pass over the scores fills a histogram. A second pass reads the scores of a single bin, so that a
threshold is exact although no list of all pairs is created.

Q queries, G gallery items, R rows of scores at a time, C classes, T thresholds, B bins.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from unimetric.errors import UnimetricError
from unimetric.geometry.nearest import exactly
from unimetric.geometry.space import Space

_BINS = 1 << 16
#: Thresholds of a bootstrap.
_GRID = 1024

#: Fewest classes with an interval. All draws of two classes weight their pairs equally, so that the interval has no width. Intervals
#: of somewhat more classes are far too narrow.
FEWEST = 8


@dataclass(frozen=True)
class Rates:
    """Error rates at a threshold.

    Args:
        threshold: Pairs with a higher score are accepted.
        fmr: Fraction of impostor pairs that are accepted: false match rate.
        fnmr: Fraction of genuine pairs that are rejected: false non-match rate.
    """

    threshold: float
    fmr: float
    fnmr: float


@dataclass(frozen=True)
class Draws:
    """Rates of bootstrap draws of whole classes: (draws,) each, in float64. See `Rates`."""

    threshold: Float[Tensor, " draws"]
    fmr: Float[Tensor, " draws"]
    fnmr: Float[Tensor, " draws"]


class PairScores:
    """Error rates of the pairs of a space. Pairs that its group rule leaves out do not count.

    If all images are queries and gallery items, each pair counts twice, which changes no rate.

    Args:
        space: Embeddings.
    """

    def __init__(self, space: Space) -> None:
        space.check_matches()
        self.space = space
        self.low, self.high = -1.00001, 1.00001
        if space.geometry != "cosine":
            ends = torch.stack([torch.stack(score[valid].aminmax()) for _, score, _, valid in self._blocks() if valid.any()])
            self.low, self.high = float(ends[:, 0].min()), float(ends[:, 1].max())
        self.scale = (_BINS - 1) / max(self.high - self.low, 1e-12)
        self.counts = torch.zeros(2, _BINS, dtype=torch.int64, device=space.device)  # impostor and genuine pairs by bin
        for _, score, same, valid in self._blocks():
            index = (self._bins(score) + _BINS * same)[valid]
            self.counts += torch.bincount(index, minlength=2 * _BINS).view(2, _BINS)
        self.impostors, self.genuine = self.counts.sum(1).tolist()
        if not self.impostors:
            raise UnimetricError(
                f"error rates of pairs need genuine and impostor pairs, but there is no impostor pair among {space.queries} queries and "
                f"{space.answers} gallery images",
                "use at least two classes with two images each",
            )

    def _blocks(self) -> Iterator[tuple[slice, Float[Tensor, "R G"], Bool[Tensor, "R G"], Bool[Tensor, "R G"]]]:
        """Yield rows, scores, which pairs are of one class, and which pairs count."""
        space = self.space
        points = space.points if space.geometry == "cosine" else space.points.to(torch.float64)
        answer, labels = points[space.gallery], space.labels[space.gallery]
        step = max(1, space.memory // (64 * space.answers))
        for start in range(0, space.queries, step):
            rows = slice(start, min(start + step, space.queries))
            query = space.query[rows]
            with exactly(points.device):
                score = space.score_all(points[query], answer)
            valid = torch.ones_like(score, dtype=torch.bool)
            own = space.own[rows]
            valid[(own >= 0).nonzero()[:, 0], own[own >= 0]] = False
            if space.barred is not None:
                space.barred.fill(valid, 0, top=start)
            yield rows, score, labels == space.labels[query, None], valid

    def _bins(self, score: Float[Tensor, "..."]) -> Int[Tensor, "..."]:
        return ((score - self.low) * self.scale).clamp_(0, _BINS - 1).to(torch.int64)

    def _values(self, number: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Return the distinct scores of a bin in ascending order, with their counts.

        The first pair is of impostors, the second of genuine pairs.
        """
        found: list[tuple[Tensor, Tensor]] = []
        empty = self.space.points.new_empty(0, dtype=torch.float64), torch.empty(0, dtype=torch.int64, device=self.space.device)
        for kind in (False, True):
            values, counts = empty
            for _, score, same, valid in self._blocks():
                some = score[valid & (same == kind) & (self._bins(score) == number)].to(torch.float64)
                values, inverse = torch.unique(torch.cat([values, some]), return_inverse=True)
                counts = torch.zeros_like(values, dtype=torch.int64).index_add_(
                    0, inverse, torch.cat([counts, torch.ones_like(some).long()])
                )
            found.append((values, counts))
        return found[0], found[1]

    def _above(self, kind: int) -> Int[Tensor, "B"]:
        """Count the pairs in the bins above each bin."""
        return self.counts[kind].sum() - self.counts[kind].cumsum(0)

    def rates(self, threshold: float) -> Rates:
        """Return the error rates at a threshold."""
        number = int(self._bins(torch.tensor(threshold, dtype=torch.float64).clamp(self.low - 1, self.high + 1)))
        # The bin of a float32 score may differ by one from that of the same number in float64.
        wanted = range(max(0, number - 1), min(_BINS, number + 2))
        accepted = [int(self._above(kind)[wanted[-1]]) for kind in (0, 1)]
        for near in wanted:
            for kind, (values, counts) in enumerate(self._values(near)):
                accepted[kind] += int(counts[values > threshold].sum())
        return Rates(threshold, accepted[0] / self.impostors, 1 - accepted[1] / self.genuine)

    def threshold(self, fmr: float) -> float:
        """Return the lowest score at which at most a fraction of the impostors is accepted.

        Returns -inf if all impostors may be accepted.

        Args:
            fmr: False match rate.
        """
        allowed = int(fmr * self.impostors * (1 + 1e-12))
        if allowed >= self.impostors:
            return -torch.inf
        above = self._above(0)
        number = int((above <= allowed).nonzero()[0, 0])  # the lowest bin whose higher bins hold at most the allowed pairs
        values, counts = self._values(number)[0]
        accepted = int(above[number]) + counts.sum() - counts.cumsum(0)
        return float(values[(accepted <= allowed).nonzero()[0, 0]])

    def equal_error(self) -> Rates:
        """Return the threshold at which the larger of both rates is smallest."""
        thresholds, fmr, fnmr = self.curve()
        number = int((fmr <= fnmr).nonzero()[0, 0])  # both rates cross in this bin
        kinds = self._values(number)
        every = torch.unique(torch.cat([values for values, _ in kinds]))
        accepted = []
        for kind, (values, counts) in enumerate(kinds):
            below = torch.nn.functional.pad(counts.cumsum(0), (1, 0))[torch.searchsorted(values, every, right=True)]
            accepted.append(self._above(kind)[number] + counts.sum() - below)
        fmrs, fnmrs = accepted[0].double() / self.impostors, 1 - accepted[1].double() / self.genuine
        if number:  # the end of the bin below, too
            every = torch.cat([thresholds[number - 1 : number], every])
            fmrs, fnmrs = torch.cat([fmr[number - 1 : number], fmrs]), torch.cat([fnmr[number - 1 : number], fnmrs])
        best = int(torch.maximum(fmrs, fnmrs).argmin())
        return Rates(float(every[best]), float(fmrs[best]), float(fnmrs[best]))

    def curve(self) -> tuple[Float[Tensor, "B"], Float[Tensor, "B"], Float[Tensor, "B"]]:
        """Return thresholds and both error rates at the upper ends of the bins.

        The rates are the false match rate and the false non-match rate.
        """
        threshold = self.low + torch.arange(1, _BINS + 1, dtype=torch.float64, device=self.space.device) / self.scale
        return threshold, self._above(0).double() / self.impostors, 1 - self._above(1).double() / self.genuine

    # --- whole classes -----------------------------------------------------------------------------------------------

    def _by_class(self, thresholds: Float[Tensor, "T"]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Count accepted pairs and all pairs by class.

        Returns accepted impostors (C, T), all impostors (C,), accepted genuine pairs (C, T) and all genuine
        pairs (C,).

        An impostor pair counts for the classes of both of its images.
        """
        space, size = self.space, len(thresholds)
        labels = space.labels[space.gallery]
        accepted = torch.zeros(2, space.classes * size, dtype=torch.int64, device=space.device)
        totals = torch.zeros(2, space.classes, dtype=torch.int64, device=space.device)
        for rows, score, same, valid in self._blocks():
            query = space.labels[space.query[rows]]
            for kind, pairs in enumerate((valid & ~same, valid & same)):
                totals[kind].index_add_(0, query, pairs.sum(1))
                row, column = (pairs & (score >= thresholds[0])).nonzero().unbind(1)
                # The highest threshold below the score; -1 for a score that equals the first one, up to the rounding of float32.
                highest = torch.searchsorted(thresholds, score[row, column].to(torch.float64)) - 1
                row, column, highest = row[highest >= 0], column[highest >= 0], highest[highest >= 0]
                accepted[kind] += torch.bincount(query[row] * size + highest, minlength=space.classes * size)
                if kind == 0:
                    totals[kind].index_add_(0, labels, pairs.sum(0))
                    accepted[kind] += torch.bincount(labels[column] * size + highest, minlength=space.classes * size)
        counts = accepted.view(2, space.classes, size).flip(2).cumsum(2).flip(2).double()
        return counts[0], totals[0].double(), counts[1], totals[1].double()

    def resample(self, *, fmr: float | None = None, threshold: float | None = None, draws: int = 1000) -> Draws:
        """Draw whole classes with replacement, and compute the rates of each draw.

        A pair of the classes a and b, which are drawn w_a and w_b times, has the weight w_a + w_b - 1:
        the product of both to first order. With a rate, each draw has its own threshold, one of 1024
        between the thresholds of eight times the rate and of none.

        Args:
            fmr: False match rate that chooses the threshold of each draw.
            threshold: Fixed threshold, instead.
            draws: Number of draws, seeded by the seed of the space.
        """
        if fmr is None:
            grid = torch.tensor([threshold], dtype=torch.float64, device=self.space.device)
        else:
            low, high = max(self.low, self.threshold(min(1.0, 8 * fmr))), self.threshold(0.0)
            grid = torch.linspace(low, high, _GRID - 1, dtype=torch.float64, device=self.space.device)
            grid = torch.cat([grid, grid.new_tensor([self.threshold(fmr)])]).sort().values
        accepted, impostors, matched, genuine = self._by_class(grid)
        classes = int(torch.unique(self.space.labels).numel())
        generator = torch.Generator().manual_seed(self.space.seed)
        found = torch.empty(3, draws, dtype=torch.float64)
        for draw in range(draws):
            drawn = torch.randint(classes, (classes,), generator=generator)
            weight = torch.bincount(drawn, minlength=self.space.classes).double().to(self.space.device)
            # The sum of (w_a + w_b - 1) over pairs. `accepted` counts each pair for both of its classes.
            false = ((weight - 0.5) @ accepted / ((weight - 0.5) @ impostors).clamp_min(1e-12)).clamp(0, 1)
            missed = 1 - weight @ matched / (weight @ genuine).clamp_min(1e-12)
            index = 0
            if fmr is not None:
                right = (false <= fmr).nonzero()
                index = int(right[0, 0]) if len(right) else _GRID - 1
            found[:, draw] = torch.stack([grid[index], false[index], missed[index]]).cpu()
        return Draws(*found)

    def interval(self, drawn: Float[Tensor, " draws"], level: float) -> tuple[float, float] | None:
        """Return the interval of bootstrap draws of whole classes, or None for too few classes.

        Args:
            drawn: Value of each draw.
            level: Level of the interval.
        """
        return quantiles(drawn, level) if self.space.classes >= FEWEST else None


def quantiles(values: Float[Tensor, " draws"], level: float) -> tuple[float, float]:
    """Return the ends of the central interval of bootstrap draws."""
    low, high = values.quantile(torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=values.dtype)).tolist()
    return low, high
