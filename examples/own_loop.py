"""Use a loss of Unimetric in your own PyTorch loop.

    python examples/own_loop.py --steps 200

Only three names come from Unimetric: a loss, a `Space` of embeddings, and a metric. The model, the optimizer and
the data are plain PyTorch. The images are synthetic: a class is a random pattern, hidden under a mixture of eight other
patterns that all classes share. The model has to learn to ignore the mixture, and that also helps on new classes.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

from unimetric import Space
from unimetric.losses.multi_similarity import MultiSimilarity
from unimetric.metrics import measure


def make_images(classes: int, per_class: int, shared: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return images (N, 1, 16, 16) and labels (N,)."""
    patterns = torch.randn(classes, 1, 16, 16, generator=generator)
    labels = torch.arange(classes).repeat_interleave(per_class)
    mixtures = torch.randn(len(labels), len(shared), generator=generator)
    return patterns[labels] + 2 * torch.einsum("nk,kchw->nchw", mixtures, shared), labels


def evaluate(model: nn.Module, images: Tensor, labels: Tensor) -> dict[str, float]:
    """Return retrieval metrics: each image is a query, all others are the gallery."""
    model.eval()
    with torch.no_grad():
        space = Space(model(images), labels)
    model.train()
    return measure(space, ["recall(k=1)", "map_at_r"])


def main() -> None:
    """Train on 50 classes, and evaluate on 20 other classes before and after."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps

    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    shared = torch.randn(8, 1, 16, 16, generator=generator)
    images, labels = make_images(50, 20, shared, generator)
    test_images, test_labels = make_images(20, 20, shared, generator)

    model = nn.Sequential(nn.Flatten(), nn.Linear(256, 64))
    print("before:", evaluate(model, test_images, test_labels))

    loss_of = MultiSimilarity(alpha=2.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(steps):
        rows = torch.randint(len(images), (64,), generator=generator)
        loss = loss_of(model(images[rows]), labels[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    print("after:", evaluate(model, test_images, test_labels))


if __name__ == "__main__":
    main()
