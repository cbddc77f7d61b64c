"""Commands that build an index of images and search it: `index`, `search`."""

from __future__ import annotations

import json
import os
import time
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import typer

from unimetric.cli.imports import importing
from unimetric.cli.options import Device, IndexFolder, RayAddress, Settings, read_overrides, write_json
from unimetric.errors import Interrupted, UnimetricError, counted


def index(
    model: Annotated[
        str, typer.Argument(help="Run folder, exported folder or file (.onnx), or backbone spec string with pretrained weights.")
    ],
    source: Annotated[
        str,
        typer.Argument(
            help="Folder of images, csv or parquet file with a column `path`, tar files or pack, a URL of these, or dataset spec."
        ),
    ],
    settings: Settings = None,
    *,
    out: Annotated[Path, typer.Option(help="Index folder. An index there is resumed or updated.")],
    store: Annotated[
        str | None,
        typer.Option(help="Store spec string: flat, lance or pgvector (default: flat, or that of the index).", show_default=False),
    ] = None,
    labels: Annotated[
        bool | None,
        typer.Option("--labels/--no-labels", help="Whether the class of an image is the name of its folder.", show_default=False),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            help="Processes that read images (default: one per core, at most 16). With --ray: shards at once.", min=0, show_default=False
        ),
    ] = None,
    ray: RayAddress = "",
    gpus: Annotated[float, typer.Option(help="With --ray: GPUs per worker; 0.5 puts two workers on one GPU.", min=0)] = 0.0,
    cpus: Annotated[float, typer.Option(help="With --ray: CPU cores per worker.", min=0)] = 1.0,
    shards: Annotated[
        str, typer.Option(help="With --ray: shared folder or fsspec URL of unmerged shards (default: `shards/` in the index).")
    ] = "",
) -> None:
    """Embed images of a folder or a csv file, and store them in an index.

    The same command resumes an interrupted build, and later reads only new, changed and deleted images.

    Examples:

    - `unimetric index runs/mine images/ --out my.index --labels`
    - `unimetric index runs/mine images.csv --out my.index --store "lance(recall=0.99)"`
    - `unimetric index efficientnet_lite images/ --out my.index device=cuda`
    - `unimetric index mine.onnx images/ --out my.index`
    - `unimetric index runs/mine "s3://bucket/{000..009}.tar" --out my.index`
    - `unimetric index runs/mine images/ --out my.index --ray auto --workers 8 --gpus 1 --cpus 8`
    """
    with importing():
        import torch

        from unimetric.deploy.building import build
        from unimetric.deploy.facts import UNREADABLE, Facts
        from unimetric.runs.device import peak_memory
        from unimetric.runs.display import Display

    overrides = read_overrides(settings, index)
    cluster = _read_cluster(ray, workers, gpus, cpus, shards)
    begun = time.monotonic()
    with Display() as display:

        def progress(done: int, total: int) -> None:
            speed = f"{done / (time.monotonic() - begun):,.1f} images/s" if display.live else ""  # plain lines have it
            display.step("embedding", done, total, speed)

        try:
            options = {"workers": workers, "cluster": cluster, "progress": progress, "note": display.line}
            counts = build(model, source, out, store=store, labels=labels, **options, **overrides)
        except KeyboardInterrupt:
            raise Interrupted(f"{out}: incomplete; run the same command to resume") from None
        facts = Facts.read(out)
        seconds = time.monotonic() - begun
        words = [f"{counts[key]:,} {key}" for key in ("added", "changed", "deleted")]
        memory = peak_memory(torch.device("cpu"))
        display.line(f"{out}: {counted(facts.count, 'image')} ({', '.join(words)}) in {seconds:.1f} s, peak memory {memory:.2f} GiB")
        if counts["unreadable"]:
            display.line(f"{counts['unreadable']:,} files could not be read; see {out / UNREADABLE}")
        display.line(f"search it with: unimetric search {quote(str(out))} IMAGE")


def _read_cluster(address: str, workers: int | None, gpus: float, cpus: float, shards: str) -> Any:
    """Return the cluster of some options, or None without `--ray`."""
    from unimetric.deploy.sharding import Cluster

    if address:
        return Cluster(address, workers, gpus, cpus, shards)
    if gpus != 0.0 or cpus != 1.0 or shards:
        raise UnimetricError("`--gpus`, `--cpus` and `--shards` require `--ray`", "add `--ray auto`, or remove them")
    return None


def search(
    folder: IndexFolder,
    images: Annotated[list[str], typer.Argument(help="Image files.", metavar="IMAGE...")],
    k: Annotated[int, typer.Option("-k", help="Number of images per query.", min=1)] = 10,
    where: Annotated[str, typer.Option(help="Filter, such as \"label = 'boot' and price < 50\".")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="One line of JSON per query.")] = False,
    device: Device = "auto",
) -> None:
    """Find the images of an index that are most similar to some images.

    Examples:

    - `unimetric search my.index query.jpg -k 10`
    - `unimetric search my.index more/*.jpg --where "label='boot' and price < 50" --json`
    """
    with importing():
        from unimetric.deploy.index import Index

    with Index.open(folder, device=device).check_complete() as opened:
        for start in range(0, len(images), 256):  # bounded memory for any number of queries
            some = images[start : start + 256]
            for name, hits in zip(some, opened.search(some, k, where or None), strict=True):
                print("\n".join(_describe_hits(name, hits, as_json=as_json, limit=opened.thresholds)))


def _describe_hits(name: str, hits: list[Any], *, as_json: bool, limit: dict[str, Any] | None) -> list[str]:
    """Return the lines of a query's hits."""
    from unimetric.images.remote import is_remote

    if as_json:
        found = [{"path": each.path, "score": each.score, "known": each.known, "columns": each.columns} for each in hits]
        return [json.dumps({"query": name, "hits": found}, ensure_ascii=False)]
    known = "" if limit is None or not hits else "   known" if hits[0].known else "   unknown"
    lines = [f"{name}{known}" if hits else f"{name}   no image matches"]
    for hit in hits:
        values = "  ".join(f"{key}={value}" for key, value in hit.columns.items() if value is not None)
        path = hit.path if is_remote(hit.path) else os.path.relpath(hit.path)
        lines.append(f"  {hit.score:.4f}  {path}" + (f"  {values}" if values else ""))
    return lines


# --- indexes as the target of other commands ----------------------------------------------------------------------------


def _reject_others(path: str | Path, others: dict[str, Any]) -> None:
    """Raise an error if an option was given that has no meaning for an index."""
    for name, given in others.items():
        if given:
            raise UnimetricError(f"{path}: `{name}` requires a run folder, got an index", "remove it")


def evaluate_stored(
    path: str, metrics: list[str], level: float, out: Path | None, others: dict[str, Any], *, ray: str, gpus: float
) -> None:
    """Evaluate an index, and print the values of exact and of stored neighbors."""
    from unimetric.deploy.index import Index
    from unimetric.deploy.measuring import evaluate_index
    from unimetric.runs.display import Display

    _reject_others(path, others)
    with Display() as display, Index.open(path, device="cpu").check_complete() as opened:
        progress = partial(display.step, "searching")
        cluster = _read_cluster(ray, None, gpus, 1.0, "")
        found = evaluate_index(opened, metrics=metrics, level=level, progress=progress, cluster=cluster)
        display.line(f"{'':<32} {'exact':>8} {opened.facts.store.partition('(')[0]:>8}")
        for name, value in found["exact"].items():
            display.line(f"{name:<32} {value:>8.4f} {found['store'][name]:>8.4f}")
    write_json(out, found)


def calibrate_stored(path: Path, fpr: float, level: float, draws: int, others: dict[str, Any]) -> None:
    """Calibrate an index, and print its threshold."""
    from unimetric.deploy.facts import THRESHOLDS
    from unimetric.deploy.index import Index
    from unimetric.deploy.measuring import calibrate_index
    from unimetric.geometry.pair_scores import FEWEST

    _reject_others(path, others)
    with Index.open(path, device="cpu").check_complete() as opened:
        result = calibrate_index(opened, fpr=fpr, level=level, draws=draws)
    interval, classes = result["threshold_interval"], result["classes"]
    spread = f"{format_interval(interval)} over {classes:,} classes" if interval else f"no interval of {classes} classes; it needs {FEWEST}"
    print(f"threshold {result['threshold']:.4f}   {spread}   score: {result['score']}")
    print(f"missed pairs of one class {result['fnr']:.4f}   {format_interval(result['fnr_interval'])}".rstrip())
    if warning := warn_of_copies(result, result["fnr"]):
        print(f"{warning}; find them with: unimetric audit {quote(str(path))}")
    print(f"see {path / THRESHOLDS}; `search` marks scores above the threshold as known")


def format_interval(ends: tuple[float, float] | None) -> str:
    """Return an interval in brackets, or nothing if there is none."""
    return f"[{ends[0]:.4f}, {ends[1]:.4f}]" if ends else ""


def warn_of_copies(result: dict[str, Any], fnr: float) -> str:
    """Return a warning about a threshold that accepts almost nothing, or "".

    Args:
        result: Result of a calibration.
        fnr: Fraction of the pairs of one class that it rejects.
    """
    if fnr < 0.99:
        return ""
    equal = result["score"] == "cosine" and result["threshold"] > 1 - 1e-6  # the cosine of equal embeddings is 1 up to rounding
    what = "have equal embeddings, as copies of an image do" if equal else "are as similar"
    return f"warning: the threshold accepts almost nothing, because over {100 * result['fpr']:.3g} % of the pairs of two classes {what}"
