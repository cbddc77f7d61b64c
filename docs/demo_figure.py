"""Draws `docs/demo.png` from a finished demo: queries never seen in training, and their neighbours before and after.

unimetric demo && python docs/demo_figure.py runs/demo
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib
import numpy as np
import torch

from unimetric.geometry import unit
from unimetric.images.loading import View, open_pictures
from unimetric.images.pack import decode
from unimetric.runs.device import open_fabric
from unimetric.runs.embed import embed
from unimetric.runs.folder import open_run
from unimetric.runs.model import build_model
from unimetric.runs.rows import read_table
from unimetric.spec import create

matplotlib.use("agg")
from matplotlib import pyplot as plt

QUERIES, NEIGHBOURS = 7, 6


def main(folder: str) -> None:
    config, trained = open_run(folder)
    table, split = read_table(config)
    rows = split.test
    fabric = open_fabric(config)
    pictures = open_pictures(table, device=fabric.device, mean=trained.mean, std=trained.std)
    chosen = np.random.default_rng(4).choice(len(rows), QUERIES, replace=False)
    figure, axes = plt.subplots(QUERIES, 2 * NEIGHBOURS + 3, figsize=(9.0, 4.4))
    for axis in axes.flat:
        axis.axis("off")
    for place, (name, model) in enumerate({"untrained": build_model(config), "trained": trained}.items()):
        look = View(create("transforms", config.transform))
        points = unit(embed(fabric, fabric.setup(model), pictures, rows, look, batch=256))
        similarity = points[chosen] @ points.T
        similarity[torch.arange(QUERIES), torch.from_numpy(chosen)] = -2
        near = similarity.topk(NEIGHBOURS).indices.numpy()
        for line in range(QUERIES):
            axes[line, 0].imshow(decode(table.paths[rows[chosen[line]]]))
            for column in range(NEIGHBOURS):
                axis = axes[line, 2 + place * (NEIGHBOURS + 1) + column]
                axis.imshow(decode(table.paths[rows[near[line, column]]]))
                same = table.labels[rows[near[line, column]]] == table.labels[rows[chosen[line]]]
                axis.add_patch(plt.Rectangle((0, 0), 31, 31, fill=False, linewidth=2.5, edgecolor="#2a9d4a" if same else "#c8553d"))
        axes[0, 2 + place * (NEIGHBOURS + 1) + NEIGHBOURS // 2].set_title(name, fontsize=11, loc="right")
    axes[0, 0].set_title("query", fontsize=11)
    figure.subplots_adjust(0.01, 0.01, 0.99, 0.92, 0.08, 0.08)
    figure.savefig(Path(__file__).with_name("demo.png"), dpi=110)


if __name__ == "__main__":
    main(sys.argv[1])
