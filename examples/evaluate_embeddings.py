"""Evaluate embeddings that another library made.

    python examples/evaluate_embeddings.py embeddings.npz

The file has `embeddings` (N, D) and `labels` (N,). Each row is a query against all others. The search is exact, in
bounded memory, and never returns the query itself. `--size` limits the memory of the search in MiB.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from unimetric import Space, UnimetricError
from unimetric.files import read_arrays
from unimetric.metrics import explain, interval, measure

METRICS = ["recall(k=1)", "recall(k=10)", "map_at_r", "nmi"]


def main() -> None:
    """Print each metric with its meaning, and a 95 % interval of recall@1 over other classes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", help=".npz with `embeddings` and `labels`")
    parser.add_argument("--size", type=int, default=512, help="MiB of memory for the search")
    options = parser.parse_args()

    arrays = read_arrays(Path(options.file), "save it with numpy.savez(path, embeddings=..., labels=...)")
    space = Space(torch.from_numpy(arrays["embeddings"]), torch.from_numpy(arrays["labels"]), memory=options.size * 2**20)
    for name, value in measure(space, METRICS).items():
        print(f"{name}: {value:.3f}  {explain(name)}")
    try:
        low, high = interval(space, "recall(k=1)")
        print(f"recall(k=1), 95 % interval over classes: {low:.3f} to {high:.3f}")
    except UnimetricError as error:  # there are too few classes
        print(error.message)
    print(f"queries without a match: {space.unmatched}")


if __name__ == "__main__":
    try:
        main()
    except UnimetricError as error:
        raise SystemExit(f"error: {error}") from None
