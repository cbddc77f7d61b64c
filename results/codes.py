"""Measure what the prototypes of CRT runs encode, before and after training.

    python results/codes.py runs/crt --device cuda

Prints one line of JSON per run, untrained and trained, over the test images of the run:

- `cosine`: mean cosine similarity between two codes r_k of an image. At 1, all prototypes encode the same.
- `variation`: standard deviation of the weights a_kj over the positions j of an image, divided by their mean. At 0, a code is a sum
  over all positions.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import torch
from torch.nn.functional import normalize

from unimetric.images.loading import View, open_pictures
from unimetric.runs.device import open_fabric
from unimetric.runs.folder import open_run
from unimetric.runs.model import Model, build_model
from unimetric.runs.rows import read_table
from unimetric.spec import create


@torch.inference_mode()
def describe(model: Model, batches: list[torch.Tensor]) -> dict[str, float]:
    """Return the mean cosine between codes and the variation of the weights."""
    prototypes, cosines, variations = model.head.prototype_sets[0], [], []
    for images in batches:
        tokens = model.backbone(images)
        positions = model.head._positions(tokens)
        weights = model.head.maps(tokens)[:, : len(prototypes)]  # (B, K, N)
        codes = weights @ positions - weights.sum(2)[..., None] * prototypes
        similarity = normalize(codes, dim=2) @ normalize(codes, dim=2).transpose(1, 2)
        count = len(prototypes)
        cosines.append((similarity.sum((1, 2)) - count) / max(1, count * (count - 1)))
        variations.append((weights.std(2) / weights.mean(2)).mean(1))
    return {"cosine": float(torch.cat(cosines).mean()), "variation": float(torch.cat(variations).mean())}


def main() -> None:
    """Print the measures of the runs named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--images", type=int, default=1024, help="number of test images, evenly spaced")
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    for run in options.runs:
        config, trained = open_run(run)
        config = replace(config, device=options.device)
        device = open_fabric(config).device
        table, split = read_table(config)
        rows = split.test[:: max(1, len(split.test) // options.images)]
        loader = open_pictures(table, device=device, mean=trained.mean, std=trained.std, residence="auto")
        view = View(create("transforms", config.transform))
        batches = list(loader.load([(some, view) for some in (rows[start : start + 64] for start in range(0, len(rows) - 63, 64))]))
        for state, model in (("untrained", build_model(config)), ("trained", trained)):
            print(json.dumps({"run": run.name, "seed": config.seed, "state": state} | describe(model.to(device).eval(), batches)))


if __name__ == "__main__":
    main()
