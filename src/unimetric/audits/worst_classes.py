"""Classes that are confused with others most."""

from __future__ import annotations

from collections import Counter

import numpy as np
import torch

from unimetric.arguments import Count
from unimetric.kinds import Audited, Findings, Group


def worst_classes(gallery: Audited, *, most: Count = 20) -> Findings:
    """Classes with the lowest recall@1, and the classes that are found instead.

        recall@1 of a class = fraction of its images whose nearest neighbor has the same label

    Classes of one image are excluded, and images without a label are not neighbors.

    Reference:
        Recall@k of Product quantization for nearest neighbor search (Jegou et al., TPAMI 2011), per class.

    Args:
        gallery: Images.
        most: Number of classes.
    """
    title, note = "Worst classes", "Classes with the lowest recall@1. Each row shows errors: an image, then its nearest neighbor."
    labels = [None if label is None else str(label) for label in gallery.labels]
    sizes = Counter(label for label in labels if label is not None)
    if len(sizes) < 2 or max(sizes.values()) < 2:
        return Findings(title, note)
    labeled = np.array([label is not None for label in labels])
    space = gallery.space if labeled.all() else gallery.space.within(torch.from_numpy(labeled))
    nearest = np.full(len(labels), -1)
    nearest[labeled] = np.flatnonzero(labeled)[space.neighbors(1)[:, 0].numpy()]
    errors: dict[str, list[int]] = {label: [] for label, size in sizes.items() if size > 1}
    for row, label in enumerate(labels):
        if label in errors and labels[nearest[row]] != label:
            errors[label].append(row)
    recall = {label: 1 - len(rows) / sizes[label] for label, rows in errors.items()}
    order = [label for label in sorted(recall, key=lambda each: (recall[each], each)) if errors[label]][:most]
    groups, rows_ = [], []
    for label in order:
        instead = Counter(str(labels[nearest[row]]) for row in errors[label])
        words = ", ".join(f"{name} ({times})" for name, times in instead.most_common(3))
        shown = [each for row in errors[label][:3] for each in (row, int(nearest[row]))]
        caption = f"{label}: recall@1 {100 * recall[label]:.0f} % of {sizes[label]} images, found instead: {words}"
        groups.append(Group(caption, [gallery.ids[row] for row in shown], [str(labels[row]) for row in shown]))
        rows_.append({"label": label, "images": sizes[label], "recall": round(recall[label], 4), "found instead": words})
    average = float(np.mean(list(recall.values())))
    return Findings(title, f"{note} Mean over all {len(recall)} classes: {100 * average:.1f} %.", groups, rows_)
