"""Exact store of files: memory-mapped shards and an exact search."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from unimetric.arguments import Count
from unimetric.errors import DAMAGED_INDEX, UnimetricError
from unimetric.files import remove_stale, wait_for_lock, write_text
from unimetric.geometry.nearest import best, exactly
from unimetric.kinds import Store
from unimetric.stores._points import TYPES, check_ids, check_points, check_queries, no_hits, unknown_id
from unimetric.stores._shard import Shard, hash_ids, map_arrays, write_arrays
from unimetric.stores._where import Filter, Where, comparisons, mask, read_filter

VERSION = 1
#: Rows below which a shard is merged with others, and how many of them are left until the next merge.
_SMALL, _FEW = 32768, 16
#: Bytes of vectors of a merged shard, and of the scores of a block.
_LARGE, _SCORES = 1 << 28, 1 << 25
#: Bytes of vectors below which `finish` merges any two shards. A search of more takes long in any case, and their copy does, too.
_CHEAP = 1 << 25
#: Queries and rows of a block of scores.
_QUERIES, _ROWS = 512, 65536
#: Highest score of two vectors of length 1, with room for their rounding.
_HIGHEST = 1.01
#: Fraction of dead rows from which `finish` rewrites a shard.
_DEAD = 0.1


class Flat(Store):
    """Exact search in memory-mapped files. It needs no further package.

    A search reads all vectors, so its time grows with their number. Memory holds one block of scores, and the
    operating system keeps the files in memory while there is room.

    `write` adds a file of points, a shard. Rows that it replaces are marked as dead. `manifest.json` lists the shards
    and is replaced atomically, so a killed call has no effect. `finish` merges small shards, if they are
    many or have few bytes, and removes dead rows.

    Reference:
        Bounds of the eight-bit search by Cauchy-Schwarz, as in `geometry.prefilter`; layout of files as in
        safetensors (Hugging Face, 2022).

    Args:
        path: Folder of the store.
        dim: Dimension of the vectors.
        dtype: Type of the vectors in the files. `float16` halves them and rounds scores to about four digits. `int8`
            keeps float32 on disk and searches a quarter of the bytes: bounds select the points that float32 then
            scores, so the result is that of `float32`.
    """

    def __init__(self, *, path: str, dim: Count, dtype: Literal["float32", "float16", "int8"] = "float32") -> None:
        self.path, self.dim, self.dtype = Path(path), dim, dtype
        self.report: Mapping[str, Any] = {}
        self._writing = False
        self._kind = np.dtype("<f2" if dtype == "float16" else "<f4")
        self._open()

    # --- files -------------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        """Read the manifest and map its shards.

        A writer may remove a shard in between. Then the manifest is new, and is read again.
        """
        for attempt in range(5):
            manifest = self._read_manifest()
            try:
                shards = [self._open_shard(each) for each in manifest["shards"]]
            except FileNotFoundError as error:
                if attempt == 4:
                    raise UnimetricError(f"{error.filename}: is missing", DAMAGED_INDEX) from None
                continue
            self._manifest, self._shards = manifest, shards
            return

    def _read_manifest(self) -> dict[str, Any]:
        file = self.path / "manifest.json"
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
            if found["version"] > VERSION:
                raise UnimetricError(f"{file}: was written by a newer Unimetric", "update Unimetric")
            kinds = {str(name): TYPES[kind] for name, kind in found["columns"].items()}
            shards = [{"name": str(each["name"]), "dead": str(each["dead"])} for each in found["shards"]]
            held = {"dim": int(found["dim"]), "dtype": str(found["dtype"])}
            following = int(found["next"])
        except FileNotFoundError:
            if (self.path / "points.lance").exists():
                raise UnimetricError(f"{self.path}: is a store `lance`", "use that store, or another folder") from None
            return {"columns": {}, "shards": [], "next": 0}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UnimetricError(f"{file}: cannot be read: {error}", DAMAGED_INDEX) from None
        if any("/" in name or name.startswith(".") for each in shards for name in each.values()):
            raise UnimetricError(f"{file}: names files outside its folder", DAMAGED_INDEX)
        if held["dim"] != self.dim:
            raise UnimetricError(f"{self.path}: holds vectors of {held['dim']} dimensions, not {self.dim}", "use the model of the index")
        if held["dtype"] != self.dtype:
            raise UnimetricError(
                f"{self.path}: was created by `flat(dtype='{held['dtype']}')`, not '{self.dtype}'", "use the same store, or another folder"
            )
        return {"columns": kinds, "shards": shards, "next": following}

    def _open_shard(self, entry: dict[str, str]) -> Shard:
        shard = Shard(self.path / entry["name"])
        if entry["dead"]:
            shard.dead = np.zeros(shard.rows, bool)
            shard.dead[map_arrays(self.path / entry["dead"])[0]["rows"]] = True
        if shard.vectors.shape[1:] != (self.dim,) or shard.vectors.dtype != self._kind:
            raise UnimetricError(f"{shard.path}: holds vectors of another store", DAMAGED_INDEX)
        return shard

    @contextmanager
    def _alone(self) -> Iterator[bool]:
        """Keep other writers out, and read what they have written.

        Yields whether there was anything.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UnimetricError(f"{self.path}: cannot be written: {error.strerror}", "use a folder that you can write to") from None
        with wait_for_lock(self.path):
            changed = self._read_manifest() != self._manifest
            if changed:
                self._open()
            yield changed

    def _begin_writing(self) -> None:
        """Remove the files that a killed writer has left, once per process."""
        if not self._writing:
            remove_stale(self.path)
            self._remove_unlisted()
            self._writing = True

    def _remove_unlisted(self) -> None:
        listed = {name for each in self._manifest["shards"] for name in each.values()}
        for file in self.path.iterdir():
            if file.suffix in (".points", ".dead") and file.name not in listed:
                with suppress(OSError):
                    file.unlink()

    def _commit(self, entries: list[dict[str, str]], shards: list[Shard], following: int, kinds: Mapping[str, type]) -> None:
        """Make a list of shards the content of the store."""
        content = {
            "version": VERSION,
            "dim": self.dim,
            "dtype": self.dtype,
            "next": following,
            "columns": {name: kind.__name__ for name, kind in kinds.items()},
            "shards": entries,
        }
        write_text(self.path / "manifest.json", json.dumps(content, ensure_ascii=False))
        self._manifest = {"columns": dict(kinds), "shards": entries, "next": following}
        self._shards = shards

    def _write_dead(self, number: int, located: Mapping[int, np.ndarray]) -> tuple[list[dict[str, str]], list[Shard]]:
        """Write the rows that `_locate` returns as dead, and return the new entries and shards."""
        entries, shards = list(self._manifest["shards"]), list(self._shards)
        for index, (_, fresh) in located.items():
            old = shards[index]
            dead = np.zeros(old.rows, bool) if old.dead is None else old.dead.copy()
            dead[fresh] = True
            name = f"{number:08d}-{index}.dead"
            write_arrays(self.path / name, {"rows": np.flatnonzero(dead).astype(np.uint32)}, {}, "")
            entries[index] = entries[index] | {"dead": name}
            shards[index] = Shard(old.path, dead)
        return entries, shards

    # --- writing -----------------------------------------------------------------------------------------------------

    @property
    def columns(self) -> Mapping[str, type]:
        return self._manifest["columns"]

    def write(self, ids: Sequence[str], vectors: Float[np.ndarray, "N D"], columns: Mapping[str, Sequence[Any]]) -> None:
        ids, vectors, values, kinds = check_points(ids, vectors, columns, dim=self.dim, held=self.columns)
        if not ids:
            return
        with self._alone() as changed:
            if changed:  # there may be new columns
                ids, vectors, values, kinds = check_points(ids, vectors, columns, dim=self.dim, held=self.columns)
            self._begin_writing()
            number, name = self._manifest["next"], f"{self._manifest['next']:08d}.points"
            self._write_shard(name, ids, [vectors.astype(self._kind, copy=False)], values, kinds)
            entries, shards = self._write_dead(number, self._locate(ids))
            shard = Shard(self.path / name)
            self._commit([*entries, {"name": name, "dead": ""}], [*shards, shard], number + 1, kinds)
            if sum(each.rows < _SMALL for each in self._shards) > _FEW:
                self._merge([index for index, each in enumerate(self._shards) if each.rows < _SMALL])

    def delete(self, ids: Sequence[str]) -> None:
        ids = list(dict.fromkeys(check_ids(ids)))
        if not self.path.is_dir():
            return
        with self._alone():
            located = self._locate(ids)
            if located:
                self._begin_writing()
                entries, shards = self._write_dead(self._manifest["next"], located)
                self._commit(entries, shards, self._manifest["next"] + 1, self.columns)
                self._remove_unlisted()

    def _write_shard(
        self, name: str, ids: Sequence[str], parts: Sequence[np.ndarray], values: Mapping[str, Sequence[Any]], kinds: Mapping[str, type]
    ) -> None:
        like = np.broadcast_to(np.zeros((), self._kind), (len(ids), self.dim))
        further = _round_vectors(parts, len(ids)) if self.dtype == "int8" else {}
        Shard.write(self.path / name, ids, (like, parts), values, kinds, further)

    def finish(self) -> None:
        """Merge small shards if they are few bytes or many, and rewrite those with dead rows."""
        with self._alone() if self.path.is_dir() else nullcontext():
            self._compact()
        files = [file for each in self._manifest["shards"] for file in each.values() if file]
        self.report = {"points": len(self), "bytes": sum((self.path / file).stat().st_size for file in files), "recall": 1.0}

    def _compact(self) -> None:
        small = [index for index, each in enumerate(self._shards) if each.rows < _SMALL]
        size = sum(self._shards[index].rows for index in small) * self.dim * self._kind.itemsize
        several = len(small) > 1 and (size < _CHEAP or 2 * len(small) > _FEW)
        if several or any(self._shards[index].dead is not None for index in small):
            self._merge(small)
        index = 0
        while index < len(self._shards):
            shard = self._shards[index]
            if shard.live < (1 - _DEAD) * shard.rows:
                count = len(self._shards)
                self._merge([index])
                index -= count - len(self._shards)  # a shard without a live row disappears
            index += 1
        if self._writing:
            self._remove_unlisted()

    def _merge(self, chosen: Sequence[int]) -> None:
        """Replace some shards by one per group of about `_LARGE` bytes.

        It takes the position of the first shard. One group after another, so that little disk space is needed twice.
        """
        self._begin_writing()
        groups: list[list[int]] = [[]]
        held = 0
        for index in chosen:
            size = self._shards[index].live * self.dim * self._kind.itemsize
            if groups[-1] and held + size > _LARGE:
                groups.append([])
                held = 0
            groups[-1].append(index)
            held += size
        for group in reversed(groups):  # the last first, so that earlier positions stay
            if len(group) > 1 or (group and self._shards[group[0]].dead is not None):
                self._merge_group(group)
        self._remove_unlisted()

    def _merge_group(self, group: list[int]) -> None:
        olds = [self._shards[index] for index in group]
        rows = [old.live_rows() for old in olds]
        ids = [old.id(row) for old, some in zip(olds, rows, strict=True) for row in some.tolist()]
        entries, shards = list(self._manifest["shards"]), list(self._shards)
        number = self._manifest["next"]
        if ids:
            name = f"{number:08d}.points"
            values = {
                key: [value for old, some in zip(olds, rows, strict=True) for value in old.values(key, kind, some)]
                for key, kind in self.columns.items()
            }
            parts = _Parts(olds, rows)
            self._write_shard(name, ids, parts, values, self.columns)
            entries[group[0]], shards[group[0]] = {"name": name, "dead": ""}, Shard(self.path / name)
        for index in reversed(group[1:] if ids else group):
            del entries[index], shards[index]
        self._commit(entries, shards, number + 1, self.columns)

    # --- reading -----------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return sum(shard.live for shard in self._shards)

    def _locate(self, ids: Sequence[str]) -> dict[int, np.ndarray]:
        """Return, by shard, the positions of the ids that it holds, and their rows (2, M)."""
        hashes = hash_ids(ids)
        found = {index: list(shard.find(ids, hashes)) for index, shard in enumerate(self._shards)}
        return {index: np.array(pairs, np.int64).T for index, pairs in found.items() if pairs}

    def _locate_all(self, ids: Sequence[str]) -> dict[int, np.ndarray]:
        """Return the result of `_locate`. An unknown id is an error."""
        located = self._locate(check_ids(ids))
        unknown = set(range(len(ids))).difference(*(numbers.tolist() for numbers, _ in located.values()))
        if unknown:
            raise unknown_id(ids[min(unknown)])
        return located

    def fetch(self, ids: Sequence[str]) -> dict[str, list[Any]]:
        located = self._locate_all(ids)
        values: dict[str, list[Any]] = {name: [None] * len(ids) for name in self.columns}
        for index, (numbers, rows) in located.items():
            for name, kind in self.columns.items():
                for number, value in zip(numbers, self._shards[index].values(name, kind, rows), strict=True):
                    values[name][number] = value
        return values

    def vectors(self, ids: Sequence[str]) -> Float[np.ndarray, "N D"]:
        found = np.empty((len(ids), self.dim), np.float32)
        for index, (numbers, rows) in self._locate_all(ids).items():
            found[numbers] = self._shards[index].vectors[rows]
        return found

    def scan(self, batch: int = 4096) -> Iterator[tuple[list[str], Float[np.ndarray, "N D"], dict[str, list[Any]]]]:
        for shard in list(self._shards):
            live = shard.live_rows()
            for start in range(0, len(live), batch):
                rows = live[start : start + batch]
                columns = {name: shard.values(name, kind, rows) for name, kind in self.columns.items()}
                yield [shard.id(row) for row in rows.tolist()], shard.vectors[rows].astype(np.float32), columns

    # --- search ------------------------------------------------------------------------------------------------------

    def search(self, queries: Float[np.ndarray, "Q D"], k: int, where: Filter = None) -> tuple[np.ndarray, Float[np.ndarray, "Q k"]]:
        queries = check_queries(queries, k, self.dim)
        where = read_filter(where, self.columns)
        ids, scores = no_hits(len(queries), k)
        shards = [(shard, self._allowed(shard, where)) for shard in self._shards]
        depth = min(k, len(self))
        for start in range(0, len(queries) if depth else 0, _QUERIES):
            some = torch.from_numpy(queries[start : start + _QUERIES])
            values, found = self._search_shards(some, depth, shards)
            if not (values <= _HIGHEST).all():  # also false for nan, which sorts first
                index = int(found[~(values <= _HIGHEST)][0]) >> 32
                raise UnimetricError(f"{self._shards[index].path}: has a vector that is not of length 1", DAMAGED_INDEX)
            scores[start : start + len(some), : values.shape[1]] = values.numpy()
            for row, column in (values > -torch.inf).nonzero().tolist():
                index, line = divmod(int(found[row, column]), 1 << 32)
                ids[start + row, column] = self._shards[index].id(line)
        return ids, scores

    def _allowed(self, shard: Shard, where: Where | None) -> np.ndarray | None:
        """Return which rows of a shard a search may find, or None for all."""
        if where is None:
            return None if shard.dead is None else ~shard.dead
        names = {part.column for part in comparisons(where)} or set(self.columns)
        allowed = mask(where, {name: shard.column(name, self.columns[name]) for name in names}) if names else np.ones(shard.rows, bool)
        return allowed if shard.dead is None else allowed & ~shard.dead

    def _search_shards(
        self, queries: Float[Tensor, "Q D"], k: int, shards: Sequence[tuple[Shard, np.ndarray | None]]
    ) -> tuple[Float[Tensor, "Q K"], Tensor]:
        """Return the k best scores of each query, and shard * 2^32 + row of each.

        Ties go to the earlier row.
        """
        values, found = queries.new_empty(len(queries), 0), torch.empty(len(queries), 0, dtype=torch.int64)
        step = min(_ROWS, max(1024, _SCORES // (4 * len(queries))))
        for index, (shard, allowed) in enumerate(shards):
            # A filter that keeps few rows is applied first, and one that keeps many to the scores.
            chosen = np.flatnonzero(allowed) if allowed is not None and 4 * np.count_nonzero(allowed) < shard.rows else None
            count = shard.rows if chosen is None else len(chosen)
            for start in range(0, count, step):
                rows: Any = slice(start, min(start + step, count)) if chosen is None else chosen[start : start + step]
                barred = None if allowed is None or chosen is not None else torch.from_numpy(~allowed[rows])
                if self.dtype == "int8":
                    least = values[:, k - 1 : k] if values.shape[1] == k else None
                    score = _score_rounded(queries, shard, rows, barred, least, k)
                else:
                    score = _multiply(queries, shard.vectors[rows])
                    if barred is not None:
                        score.masked_fill_(barred, -torch.inf)
                value, column = best(score, min(k, score.shape[1]))
                place = torch.from_numpy(chosen[start : start + step])[column] if chosen is not None else column + start
                values, order = torch.cat([values, value], 1).sort(dim=1, descending=True, stable=True)
                values, found = values[:, :k], torch.cat([found, place + (index << 32)], 1).gather(1, order[:, :k])
        return values, found


def _multiply(queries: Float[Tensor, "Q D"], vectors: np.ndarray) -> Float[Tensor, "Q B"]:
    with exactly(queries.device):
        return queries @ torch.from_numpy(vectors).float().T


class _Parts(Sequence[np.ndarray]):
    """Live vectors of some shards, read when they are needed, as often as they are."""

    def __init__(self, shards: Sequence[Shard], rows: Sequence[np.ndarray]) -> None:
        self.parts = [
            (shard, some[start : start + _ROWS]) for shard, some in zip(shards, rows, strict=True) for start in range(0, len(some), _ROWS)
        ]

    def __len__(self) -> int:
        return len(self.parts)

    def __getitem__(self, number: Any) -> Any:
        shard, rows = self.parts[number]
        return shard.vectors[rows]


# --- eight bits --------------------------------------------------------------------------------------------------------


def _round_vectors(parts: Sequence[np.ndarray], count: int) -> dict[str, np.ndarray]:
    """Return vectors in eight bits, their scales, and bounds of their rounding errors."""
    codes = np.empty((count, parts[0].shape[1]), np.int8)
    scale, error = np.empty(count, np.float16), np.empty(count, np.float16)
    start = 0
    for number in range(len(parts)):
        part = np.asarray(parts[number], np.float32)
        rows = slice(start, start + len(part))
        start += len(part)
        # The scale is rounded up to half precision first, so that it is the same when the codes are read.
        scale[rows] = _round_up(np.abs(part).max(1) / 127)
        unit = scale[rows].astype(np.float32)[:, None]
        codes[rows] = np.rint(part / np.where(unit > 0, unit, 1)).clip(-127, 127)
        error[rows] = _round_up(np.linalg.norm(part.astype(np.float64) - codes[rows] * unit.astype(np.float64), axis=1))
    return {"codes": codes, "scale": scale, "error": error}


def _round_up(values: np.ndarray) -> np.ndarray:
    """Return values in half precision, none of them smaller."""
    half = values.astype(np.float16)
    return np.where(half.astype(values.dtype) < values, np.nextafter(half, np.float16(np.inf)), half)


#: Bound of the rounding errors of a product of unit vectors in float32.
_SLACK = 1e-5


def _score_rounded(
    queries: Float[Tensor, "Q D"], shard: Shard, rows: Any, barred: Tensor | None, least: Tensor | None, k: int
) -> Float[Tensor, "Q B"]:
    """Return the scores of rows that may be among the k best, and -inf for all others.

    For a query q and a vector b that is rounded to c, |<q, b> - <q, c>| <= |q| |b - c|. A row whose upper bound is below
    the k-th best score so far, or below the k-th best lower bound of this block, is not among them.

    Args:
        queries: Unit vectors.
        shard: Shard with codes.
        rows: Rows of the block.
        barred: Rows of the block that a search must not find, or None.
        least: (Q, 1) k-th best score so far, or None.
        k: Number of neighbors.
    """
    score = _multiply(queries, shard.arrays["codes"][rows])
    score *= torch.from_numpy(shard.arrays["scale"][rows]).float()
    if barred is not None:
        score.masked_fill_(barred, -torch.inf)
    error = torch.from_numpy(shard.arrays["error"][rows]).float() * (1 + _SLACK) + _SLACK
    bound = best(score - error, min(k, score.shape[1]))[0][:, -1:]
    if score.shape[1] < k:
        bound = torch.full_like(bound, -torch.inf)
    if least is not None:
        bound = torch.maximum(bound, least - _SLACK)
    query, column = ((score + error >= bound) & (score > -torch.inf)).nonzero(as_tuple=True)
    exact = torch.full_like(score, -torch.inf)
    step = max(1, _SCORES // (8 * queries.shape[1]))
    for some in torch.arange(len(query)).split(step):
        picked = column[some].numpy()
        vectors = shard.vectors[rows.start + picked if isinstance(rows, slice) else rows[picked]]
        exact[query[some], column[some]] = (queries[query[some]] * torch.from_numpy(vectors)).sum(1)
    return exact
