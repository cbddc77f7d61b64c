"""Project embeddings to two dimensions."""

from __future__ import annotations

import importlib
import warnings

import numpy as np


def project(embeddings: np.ndarray) -> tuple[str, np.ndarray]:
    """Project embeddings to two dimensions.

    The projection is UMAP (McInnes et al. 2018) if umap-learn is installed and there are more than 50 points, otherwise the first two
    principal components.

    Args:
        embeddings: Embeddings (N, D).

    Returns:
        Name of the projection, and points (N, 2).
    """
    points = embeddings.astype(np.float32)
    try:
        umap = importlib.import_module("umap")
    except ImportError:
        umap = None
    if umap is not None and len(points) > 50:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a warning that a fixed seed disables threads
            return "UMAP", umap.UMAP(metric="cosine", random_state=0).fit_transform(points)
    centered = points - points.mean(0)
    _, _, directions = np.linalg.svd(centered, full_matrices=False)
    points = centered @ directions[:2].T
    return "PCA", np.pad(points, ((0, 0), (0, 2 - points.shape[1])))
