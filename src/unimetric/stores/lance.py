"""Store in a LanceDB table on disk, searched by an index whose recall is measured."""

from __future__ import annotations

import functools
import json
import math
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, TypeVar

import numpy as np
from jaxtyping import Float, Int

from unimetric.arguments import Count, Range
from unimetric.errors import Unavailable, UnimetricError
from unimetric.files import wait_for_lock, write_json
from unimetric.kinds import Store
from unimetric.stores._points import check_ids, check_points, check_queries, no_hits, unknown_id
from unimetric.stores._recall import DEPTHS, Block, Search, draw_truth, exact_search, is_tuned, tune, tuned
from unimetric.stores._where import Filter, read_filter, to_text

_Method = TypeVar("_Method", bound=Callable[..., Any])
#: Version of the layout, in the metadata of the table.
_FORMAT = 1
_TABLE = "points"
#: Attempts of a change while other processes change the table.
_ATTEMPTS = 20
#: With fewer points, or fewer that pass a filter, an exact scan is about as fast as an index.
_INDEXED = 20_000
#: Points per partition of the index, and bits per dimension of its vectors.
_PARTITION, _BITS = 2_000, 4
#: Fraction of partitions to search, and candidates per neighbor to score exactly, by ascending cost. A candidate is a random read.
_LADDER = ((0.01, 2), (0.02, 2), (0.04, 2), (0.07, 3), (0.1, 3), (0.15, 4), (0.2, 4), (0.3, 5), (0.5, 6), (0.7, 8), (1.0, 10), (1.0, 30))
#: Ids per expression, and points per block of a scan.
_IDS, _BLOCK = 1_000, 16_384


def _repeated(method: _Method) -> _Method:
    """Repeat a method of a store if other processes have changed its table meanwhile.

    A change may conflict with another one, and `finish` removes the version of the table that others have opened.
    """

    @functools.wraps(method)
    def repeat(self: Lance, *arguments: Any, **named: Any) -> Any:
        attempt = 0
        while True:
            attempt += 1
            try:
                return method(self, *arguments, **named)
            except Unavailable as error:
                if not any(text in error.message for text in ("commit conflict", "Not found: ")) or attempt == _ATTEMPTS:
                    raise
            with self._errors():
                self._table.checkout_latest()
            self.report = MappingProxyType(self._read_report())

    return repeat  # type: ignore[return-value]


class Lance(Store):
    """LanceDB table with an index that is tuned to a required recall.

    Vectors are stored in float32. `finish` compacts the table and builds an inverted file with quantized
    vectors (RaBitQ, 4 bits per dimension). It then increases the number of searched partitions and of
    candidates that are scored exactly until the search finds the required fraction of exact neighbors, and
    stores the measured recall with its 95 % interval. Queries are stored vectors that must not find
    themselves. If the recall cannot be reached, `finish` raises an error.

    A search is an exact scan if the table has less than 20,000 points, if fewer pass the filter, for more
    than 100 neighbors, before the first `finish`, and with `recall=1`. A filter is applied before the
    search, and the number of searched partitions grows as fewer points pass. If the index still returns too
    few, the exact scan replaces its results.

    Reference:
        Lance: efficient random access in columnar storage through adaptive structural encodings (Pace et al., 2025);
        RaBitQ: quantizing high-dimensional vectors with a theoretical error bound for approximate nearest
        neighbor search (Gao and Long, SIGMOD 2024)

    Args:
        path: Folder of the table.
        dim: Dimension of the vectors.
        recall: Required fraction of the exact 10 and 100 nearest neighbors. 1 scans exactly.
    """

    def __init__(self, *, path: str, dim: Count, recall: Annotated[float, Range(above=0, most=1)] = 0.99) -> None:
        self.path = Path(path)
        self.dim = dim
        self.recall = recall
        # Processes that read images are forked, and use no store.
        warnings.filterwarnings("ignore", message="lancedb fork support is experimental")
        os.environ.setdefault("LANCEDB_LOG", "error")  # it warns of every empty partition of an index
        with self._errors():
            self._table = self._open()
        self._check_table()
        self.report: Mapping[str, Any] = MappingProxyType(self._read_report())

    # --- Opening ------------------------------------------------------------------------------------------

    def _open(self) -> Any:
        """Open the table, or create it."""
        try:
            import lancedb
            import pyarrow as pa
        except ImportError:
            raise UnimetricError("the store `lance` needs LanceDB", "pip install 'unimetric[lance]'") from None
        if (self.path / "manifest.json").exists():
            raise UnimetricError(f"{self.path}: is a store `flat`", "use that store, or another folder")
        self.path.mkdir(parents=True, exist_ok=True)
        database = lancedb.connect(str(self.path))
        # A killed creation leaves a folder without any version, which the database lists but cannot open.
        if any((self.path / f"{_TABLE}.lance" / "_versions").glob("*.manifest")):
            return database.open_table(_TABLE)
        schema = pa.schema(
            [pa.field("_id", pa.string(), nullable=False), pa.field("_vector", pa.list_(pa.float32(), self.dim), nullable=False)],
            metadata={"unimetric": json.dumps({"format": _FORMAT, "dim": self.dim})},
        )
        exists = (self.path / f"{_TABLE}.lance").exists()
        return database.create_table(_TABLE, schema=schema, mode="overwrite" if exists else "create")

    def _check_table(self) -> None:
        """Raise an error if the table is not one of this store, newer, or of another dimension."""
        written = (self._table.schema.metadata or {}).get(b"unimetric")
        if written is None:
            raise UnimetricError(f"{self.path}: the table `{_TABLE}` was not written by Unimetric", "use another folder")
        notes = json.loads(written)
        if notes["format"] > _FORMAT:
            raise UnimetricError(f"{self.path}: written by a newer version of Unimetric", "pip install --upgrade unimetric")
        if notes["dim"] != self.dim:
            raise UnimetricError(f"{self.path}: holds vectors of dimension {notes['dim']}, got {self.dim}", "use the model of the index")

    def _read_report(self) -> dict[str, Any]:
        """Return what the last `finish` has measured. Without an intact file, searches are exact."""
        try:
            report = json.loads((self.path / "tuning.json").read_text(encoding="utf-8"))
            return report if {"rows", "settings", "version"} <= set(report) else {}
        except (OSError, ValueError, TypeError):
            return {}

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Convert errors of LanceDB, which have no types of their own."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*removes every version except the latest.*")
            try:
                yield
            except (OSError, RuntimeError, ValueError) as error:
                text = str(error).partition("\n")[0][:300]
                hint = "check the folder, or remove the index folder and build it again"
                if "No space left" in str(error) or "StorageFull" in str(error):
                    hint = "free some space"
                elif "Not found: " in text:  # `scan` cannot be repeated
                    hint = "repeat the command, in case that another process has changed the table; otherwise " + hint
                raise Unavailable(f"{self.path}: {text}", hint) from error

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Wait for the changes of other processes, and read them.

        Otherwise, `finish` would remove files of their unfinished changes, and `delete` would not find their points.
        """
        with wait_for_lock(self.path):
            with self._errors():
                self._table.checkout_latest()
            yield

    @property
    def columns(self) -> Mapping[str, type]:
        types = {"string": str, "int64": int, "double": float, "bool": bool}
        fields = [field for field in self._table.schema if field.name not in ("_id", "_vector") and str(field.type) in types]
        return {_decoded(field.name): types[str(field.type)] for field in fields}

    def __len__(self) -> int:
        with self._errors():
            return int(self._table.count_rows())

    # --- Writing ------------------------------------------------------------------------------------------

    @_repeated
    def write(self, ids: Sequence[str], vectors: Float[np.ndarray, "N D"], columns: Mapping[str, Sequence[Any]]) -> None:
        import pyarrow as pa

        arrow = {str: pa.string(), int: pa.int64(), float: pa.float64(), bool: pa.bool_()}
        with self._changing():
            held = self.columns
            ids, vectors, values, types = check_points(ids, vectors, columns, dim=self.dim, held=held)
            if not ids:
                return
            fields = [pa.field(_encoded(name), arrow[each]) for name, each in types.items()]
            data: dict[str, Any] = {"_id": pa.array(ids, pa.string())}
            data["_vector"] = pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), self.dim)
            data |= {field.name: pa.array(values[name], field.type) for field, name in zip(fields, types, strict=True)}
            with self._errors():
                if len(types) > len(held):
                    self._table.add_columns([field for field, name in zip(fields, types, strict=True) if name not in held])
                table = pa.table(data).cast(self._table.schema.remove_metadata())
                self._table.merge_insert("_id").when_matched_update_all().when_not_matched_insert_all().execute(table)

    @_repeated
    def delete(self, ids: Sequence[str]) -> None:
        if len(ids):
            with self._changing(), self._errors():
                self._table.delete(_among(check_ids(ids)))  # one expression, because each call is a transaction

    # --- Searching ----------------------------------------------------------------------------------------

    @_repeated
    def search(self, queries: Float[np.ndarray, "Q D"], k: int, where: Filter = None) -> tuple[np.ndarray, Float[np.ndarray, "Q k"]]:
        queries = check_queries(queries, k, self.dim)
        where = read_filter(where, self.columns)
        text = None if where is None else to_text(where, column=lambda name: f"`{_encoded(name)}`", literal=_literal)
        with self._errors():
            total = int(self._table.count_rows())
            rows = total if text is None else int(self._table.count_rows(text))
            settings = tuned(self.report, k, recall=self.recall, place=str(self.path))
            if settings is None or rows < max(k, _INDEXED):
                return exact_search(self._blocks(text), queries, k)
            return self._search_index(queries, k, text, probes=math.ceil(settings["probes"] * total / rows), refine=settings["refine"])

    def _search_index(
        self, queries: Float[np.ndarray, "Q D"], k: int, text: str | None, *, probes: int, refine: int
    ) -> tuple[np.ndarray, Float[np.ndarray, "Q k"]]:
        """Search with the index. Queries with too few results are searched exactly.

        Args:
            queries: Unit vectors.
            k: Number of points per query.
            text: Filter as SQL, or None. At least k points pass it.
            probes: Partitions to search.
            refine: Candidates per result whose scores are computed from the stored vectors.
        """
        ids, scores = no_hits(len(queries), k)
        for top in range(0, len(queries), 64):
            some = queries[top : top + 64]
            query = self._table.search(some if len(some) > 1 else some[0], vector_column_name="_vector").distance_type("l2").limit(k)
            query = query.nprobes(max(1, probes)).refine_factor(refine).select(["_id", "_vector", "_distance"])
            found = (query if text is None else query.where(text)).to_arrow()
            vectors = _matrix(found["_vector"], self.dim)
            owner = found["query_index"].to_numpy() if len(some) > 1 else np.zeros(len(vectors), np.int64)
            score = np.einsum("nd,nd->n", vectors, some[owner])
            names = np.array(found["_id"].to_pylist(), dtype=object)
            for row in range(len(some)):
                own = np.flatnonzero(owner == row)
                own = own[np.argsort(-score[own], kind="stable")][:k]
                ids[top + row, : len(own)], scores[top + row, : len(own)] = names[own], score[own]
        short = np.flatnonzero(scores[:, -1] == -np.inf)
        if len(short):
            ids[short], scores[short] = exact_search(self._blocks(text), queries[short], k)
        return ids, scores

    def _blocks(self, text: str | None = None) -> Iterator[Block]:
        """Yield the vectors of the points that pass a filter, and functions that return their ids."""
        for batch in self._read(["_id", "_vector"], text):
            yield _matrix(batch.column("_vector"), self.dim), functools.partial(_name, batch.column("_id"))

    def _read(self, names: Sequence[str], text: str | None = None, batch: int = _BLOCK) -> Iterator[Any]:
        query = self._table.search().select(list(names))
        yield from (query if text is None else query.where(text)).to_batches(batch)

    # --- Reading ------------------------------------------------------------------------------------------

    def fetch(self, ids: Sequence[str]) -> dict[str, list[Any]]:
        names = list(self.columns)
        rows = self._rows(ids, [_encoded(name) for name in names])
        return {name: [row[_encoded(name)] for row in rows] for name in names}

    def vectors(self, ids: Sequence[str]) -> Float[np.ndarray, "N D"]:
        rows = self._rows(ids, ["_vector"])
        return np.array([row["_vector"] for row in rows], np.float32).reshape(len(rows), self.dim)

    @_repeated
    def _rows(self, ids: Sequence[str], names: Sequence[str]) -> list[dict[str, Any]]:
        """Return some columns of the points with these ids, in this order."""
        ids = check_ids(ids)
        found: dict[str, dict[str, Any]] = {}
        with self._errors():
            for top in range(0, len(ids), _IDS):
                for batch in self._read(["_id", *names], _among(ids[top : top + _IDS])):
                    found |= {row["_id"]: row for row in batch.to_pylist()}
        for each in ids:
            if each not in found:
                raise unknown_id(each)
        return [found[each] for each in ids]

    def scan(self, batch: int = 4096) -> Iterator[tuple[list[str], Float[np.ndarray, "N D"], dict[str, list[Any]]]]:
        names = list(self.columns)
        with self._errors():
            for some in self._read(["_id", "_vector", *map(_encoded, names)], batch=batch):
                for top in range(0, some.num_rows, batch):
                    part = some.slice(top, batch)
                    columns = {name: part.column(_encoded(name)).to_pylist() for name in names}
                    yield part.column("_id").to_pylist(), _matrix(part.column("_vector"), self.dim), columns

    # --- Finishing ----------------------------------------------------------------------------------------

    @_repeated
    def finish(self) -> None:
        with self._errors():
            with self._changing():
                self.report = MappingProxyType(self._read_report())
                rows = len(self)
                indexed = rows >= _INDEXED and self.recall < 1
                if self.report.get("version") == self._table.version and (not indexed or is_tuned(self.report, self.recall)):
                    return
                trained = self.report.get("trained", 0)
                # Without the file, a search is exact: right at any moment of what follows.
                (self.path / "tuning.json").unlink(missing_ok=True)
                self.report = MappingProxyType({})
                if indexed and not trained / 2 <= rows <= 2 * trained:
                    self._build_index(rows)
                    trained = rows
                # Also adds new points to the index, and removes everything that killed writes have left.
                for _ in range(2):  # the second time removes what the first has replaced
                    self._table.optimize(cleanup_older_than=timedelta(0), delete_unverified=True)
                version = self._table.version
            settings = self._tune(rows, trained) if indexed else {}
            report = {"rows": rows, "trained": trained if indexed else 0, "settings": settings, "version": version}
            write_json(self.path / "tuning.json", report)
            self.report = MappingProxyType(report)

    def _build_index(self, rows: int) -> None:
        from lancedb.index import BTree, IvfRq, IvfSq

        # RaBitQ packs eight dimensions into bytes. Other dimensions are quantized one by one.
        kind: IvfRq | IvfSq = IvfRq(distance_type="l2", num_partitions=_partitions(rows), num_bits=_BITS)
        if self.dim % 8:
            kind = IvfSq(distance_type="l2", num_partitions=_partitions(rows))
        self._table.create_index("_vector", config=kind)
        self._table.create_index("_id", config=BTree())

    def _tune(self, rows: int, trained: int) -> dict[str, Any]:
        """Return the settings of each depth, with the measured recall."""
        partitions = _partitions(trained)
        ladder = list(dict.fromkeys((max(1, math.ceil(part * partitions)), refine) for part, refine in _LADDER))
        found = {}
        for depth, queries in DEPTHS.items():
            truth = draw_truth(self._blocks, rows, k=depth, queries=2 * queries)
            (probes, refine), measured = tune(ladder, self._with, truth, self.recall)
            found[str(depth)] = {"probes": probes, "refine": refine, **measured}
        return found

    def _with(self, setting: tuple[int, int]) -> Search:
        """Return the search with some settings."""
        return lambda queries, k: self._search_index(queries, k, None, probes=setting[0], refine=setting[1])


def _partitions(rows: int) -> int:
    return max(1, rows // _PARTITION)


def _name(ids: Any, rows: Int[np.ndarray, "M"]) -> list[str]:
    """Return the ids in some rows of an Arrow column."""
    return ids.take(rows).to_pylist()


def _matrix(column: Any, dim: int) -> Float[np.ndarray, "N D"]:
    """Return an Arrow column of vectors as a matrix."""
    parts = column.chunks if "Chunked" in type(column).__name__ else [column]
    return np.concatenate([np.empty((0, dim), np.float32), *(part.flatten().to_numpy().reshape(-1, dim) for part in parts)])


# --- Names and literals of Lance, whose filters are text --------------------------------------------------


def _encoded(name: str) -> str:
    """Return the name of a column with a-z, 0-9 and _ only. Others have meanings in filters.

    >>> _encoded("price"), _encoded("Größe_2")
    ('price', '_47_r_f6__df_e__2')
    """
    plain = "abcdefghijklmnopqrstuvwxyz0123456789"
    return "".join(each if each in plain else "__" if each == "_" else f"_{ord(each):x}_" for each in name)


def _decoded(name: str) -> str:
    """Return the original name of a column.

    >>> _decoded(_encoded("a_b Ä__e9_"))
    'a_b Ä__e9_'
    """
    return re.sub("__|_([0-9a-f]+)_", lambda found: chr(int(found[1], 16)) if found[1] else "_", name)


def _literal(value: Any) -> str:
    """Return a value as a literal of SQL."""
    if isinstance(value, bool):
        return "TRUE" if value else "FALSE"
    if isinstance(value, str):
        return "'" + value.replace("'", "''") + "'"
    if isinstance(value, int):
        # The smallest integer would be read as the negative of one that is too large.
        return str(value) if value > -(2**63) else f"CAST('{value}' AS BIGINT)"
    return repr(float(value))


def _among(ids: Sequence[str]) -> str:
    return f"`_id` IN ({', '.join(map(_literal, ids))})"
