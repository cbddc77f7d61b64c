"""Store in a table of PostgreSQL with the extension pgvector."""

from __future__ import annotations

import functools
import json
import math
import os
import re
import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Annotated, Any

import numpy as np
import torch
from jaxtyping import Float, Int

from unimetric.arguments import Form, Range
from unimetric.errors import Unavailable, UnimetricError
from unimetric.geometry.kmeans import assign, kmeans
from unimetric.kinds import Store
from unimetric.stores._points import RESERVED, check_ids, check_points, check_queries, no_hits, unknown_id
from unimetric.stores._recall import DEPTHS, Block, Search, draw_points, draw_truth, exact_search, is_tuned, tune, tuned
from unimetric.stores._where import Filter, Where, quote_name, read_filter, to_sql

#: Version of the layout, in the comment of the table.
_FORMAT = 2
#: With fewer points, a scan is about as fast as lists.
_INDEXED = 20_000
#: Numbers of lists that a search reads, by ascending cost and recall. The last one is all lists.
_PROBES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
#: Numbers of neighbors for which the number of lists is tuned, and queries to measure each. The last one serves filters.
_DEPTHS = {**DEPTHS, 1000: 30}
#: Points per list that the centers are computed from.
_SAMPLE = 64
_BLOCK = 8_192
_TYPES = {"text": str, "bigint": int, "double precision": float, "boolean": bool}


class Pgvector(Store):
    """Table of PostgreSQL whose points are in lists of similar vectors.

        list(v) = argmin over lists of |v - center|

    The table has the columns `_id`, `_vector` (float32), `_list` and those of the points, so that other programs
    can read it. Every write is one transaction. From 20,000 points on, `finish` computes as many centers as the
    square root of the number of points, assigns each point to the list of the nearest one, and sorts the table by
    lists. A search scores the points of the lists whose centers are nearest to the query, in float32. `finish`
    increases their number until the search finds the required fraction of exact neighbors, and stores the
    measured recall in the comment of the table. Later points get a list when they are written. If the number of
    points has doubled, `finish` computes new centers.

    With a filter, more lists are read as fewer points pass. If few points pass, or too few of them are in these
    lists, the filter is applied first and its points are scanned exactly. An index of PostgreSQL on a filtered
    column speeds up that scan.

    The indexes of pgvector are not used: each has a copy of the vectors, and that of `hnsw` takes half an hour to
    build for a million points.

    Passwords are not part of an index: a `url` with a password is an error. Name an environment variable
    instead, such as `url='$DATABASE_URL'`, or use a password file of PostgreSQL.

    Reference:
        Video Google: a text retrieval approach to object matching in videos (Sivic and Zisserman, ICCV 2003),
        whose inverted files are these lists; pgvector (Kane et al., 2021)

    Args:
        dim: Dimension of the vectors.
        url: Connection string without a password, or `$` and the name of an environment variable that has one.
        table: Name of the table. The centers are in a second one, `TABLE_lists`.
        recall: Required fraction of the exact 10 and 100 nearest neighbors. 1 scans exactly.
    """

    def __init__(
        self,
        *,
        dim: Annotated[int, Range(1, 16_000)],
        url: str = "$DATABASE_URL",
        table: Annotated[str, Form(r"[a-z_][a-z0-9_]{0,47}", "up to 48 of a-z, 0-9 and _, not starting with a digit")] = "unimetric",
        recall: Annotated[float, Range(above=0, most=1)] = 0.99,
    ) -> None:
        self.dim = dim
        self.table = table
        self.recall = recall
        self._url = _read_url(url)
        self._place = _describe(self._url, table)
        self._open_connection: Any = None
        self._lock = threading.RLock()  # threads that share the connection would receive rows and transactions of each other
        self.report: Mapping[str, Any] = MappingProxyType({})
        self._version, self._centers = 0, np.zeros((0, dim), np.float32)
        with self._errors():
            self._open()

    # --- Opening ------------------------------------------------------------------------------------------

    def _connect(self) -> Any:
        """Return the connection. If it is broken, or the server was restarted, open another one."""
        import psycopg
        from psycopg.adapt import Dumper
        from psycopg.pq import Format

        connection = self._open_connection
        if connection is not None and _is_open(connection):
            return connection
        connection = psycopg.connect(self._url, autocommit=True, connect_timeout=10, application_name="unimetric")
        number = _value(connection.execute("SELECT to_regtype('vector')::oid"))
        if number is None:
            connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
            number = _value(connection.execute("SELECT to_regtype('vector')::oid"))

        class Vectors(Dumper):
            format = Format.BINARY
            oid = number

            def dump(self, obj: Any) -> bytes:
                return struct.pack(">HH", len(obj), 0) + obj.astype(">f4").tobytes()

        connection.adapters.register_dumper(np.ndarray, Vectors)
        # Whether an index pays depends on the values of a filter, so each query has its own plan.
        connection.execute("SET plan_cache_mode = force_custom_plan")
        self._vector_type, self._open_connection = number, connection
        return connection

    def _open(self) -> None:
        """Connect, and create the table or check whose it is."""
        connection = self._connect()
        version = _value(connection.execute("SELECT extversion FROM pg_extension WHERE extname = 'vector'"))
        if tuple(int(number) for number in re.findall(r"\d+", version)[:2]) < (0, 8):
            raise UnimetricError(f"{self._place}: needs pgvector 0.8 or newer, got {version}", "run `ALTER EXTENSION vector UPDATE`")
        name = quote_name(self.table)
        with connection.transaction():
            connection.execute("SELECT pg_advisory_xact_lock(%s)", [20_180_401])  # two processes may create it
            exists = _value(connection.execute("SELECT to_regclass(%s)", [name]))
            if exists is None:
                if _value(connection.execute("SELECT to_regclass(%s)", [self._lists])) is not None:
                    raise UnimetricError(f"{self._place}: there is already a table {self._lists}", "drop it, or use another `table`")
                columns = f'_id text COLLATE "C" PRIMARY KEY, _list integer NOT NULL DEFAULT 0, _vector vector({self.dim}) NOT NULL'
                connection.execute(f"CREATE TABLE {name} ({columns})")
                # Vectors are incompressible, and reading them from another file is slow.
                connection.execute(f"ALTER TABLE {name} ALTER COLUMN _vector SET STORAGE PLAIN")
                columns = f"version bigint, list integer, center vector({self.dim}) NOT NULL, PRIMARY KEY (version, list)"
                connection.execute(f"CREATE TABLE {self._lists} ({columns})")
                self._write_notes({"format": _FORMAT, "dim": self.dim, "version": 0, "trained": 0, "report": {}})
        notes = self._notes()
        if notes["format"] > _FORMAT:
            raise UnimetricError(f"{self._place}: written by a newer version of Unimetric", "pip install --upgrade unimetric")
        if notes["format"] < _FORMAT:
            raise UnimetricError(f"{self._place}: written by an older version of Unimetric", "drop the table and build the index again")
        if notes["dim"] != self.dim:
            raise UnimetricError(f"{self._place}: holds vectors of dimension {notes['dim']}, got {self.dim}", "use the model of the index")
        self._refresh()

    def _notes(self) -> dict[str, Any]:
        """Return the notes in the comment of the table, which identify it."""
        row = self._connect().execute("SELECT obj_description(to_regclass(%s))", [quote_name(self.table)]).fetchone()
        try:
            notes = json.loads(row[0])["unimetric"]
            numbers = {key: int(notes.get(key, 0)) for key in ("version", "trained")}
            return {"format": int(notes["format"]), "dim": int(notes["dim"]), **numbers, "report": dict(notes["report"])}
        except (TypeError, ValueError, KeyError):
            raise UnimetricError(f"{self._place}: was not written by Unimetric", "use another `table`") from None

    def _write_notes(self, notes: Mapping[str, Any]) -> None:
        from psycopg import sql

        text = sql.Literal(json.dumps({"unimetric": dict(notes)}))
        self._connect().execute(sql.SQL("COMMENT ON TABLE {} IS {}").format(sql.Identifier(self.table), text))

    def _note(self, report: Mapping[str, Any]) -> None:
        self._write_notes(self._notes() | {"report": dict(report)})
        self.report = MappingProxyType(dict(report))

    def _refresh(self) -> dict[str, Any]:
        """Read the notes and, if another program has computed them, the centers of the lists."""
        while (notes := self._notes())["version"] != self._version:
            query = f"SELECT vector_send(center) FROM {self._lists} WHERE version = %s ORDER BY list"
            rows = self._connect().execute(query, [notes["version"]], binary=True).fetchall()
            if rows or not notes["version"]:  # otherwise, another program has just replaced them
                self._version, self._centers = notes["version"], _matrix([row[0] for row in rows], self.dim)
        self.report = MappingProxyType(notes["report"])
        return notes

    @property
    def _lists(self) -> str:
        """Name of the table with the centers of the lists, quoted."""
        return quote_name(f"{self.table}_lists")

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Use the connection alone, and convert errors of PostgreSQL.

        Their first line says what happened.
        """
        import psycopg

        try:
            with self._lock:
                yield
        except psycopg.Error as error:
            text = str(error).strip().partition("\n")[0][:300]
            hint = "check the server and its logs"
            kind = UnimetricError
            if isinstance(error, psycopg.OperationalError):
                kind = Unavailable
                hint = "check that the server runs, and `url`"
            if isinstance(error, psycopg.errors.UndefinedFile | psycopg.errors.FeatureNotSupported):
                hint = "install pgvector on the server"
            if isinstance(error, psycopg.errors.InsufficientPrivilege):
                hint = "let an administrator run `CREATE EXTENSION vector` and grant CREATE on the schema"
            if isinstance(error, psycopg.errors.DiskFull):
                hint = "free some space on the server"
            raise kind(f"{self._place}: {text}", hint) from None

    def close(self) -> None:
        if self._open_connection is not None:
            self._open_connection.close()

    @property
    def columns(self) -> Mapping[str, type]:
        query = (
            "SELECT attname, format_type(atttypid, NULL) FROM pg_attribute"
            " WHERE attrelid = to_regclass(%s) AND attnum > 0 AND NOT attisdropped ORDER BY attnum"
        )
        with self._errors():
            rows = self._connect().execute(query, [quote_name(self.table)]).fetchall()
        return {name: _TYPES[kind] for name, kind in rows if name not in RESERVED and kind in _TYPES}

    def __len__(self) -> int:
        with self._errors():
            return int(_value(self._connect().execute(f"SELECT count(*) FROM {quote_name(self.table)}")))

    # --- Writing ------------------------------------------------------------------------------------------

    def write(self, ids: Sequence[str], vectors: Float[np.ndarray, "N D"], columns: Mapping[str, Sequence[Any]]) -> None:
        held = self.columns
        ids, vectors, values, types = check_points(ids, vectors, columns, dim=self.dim, held=held)
        if not ids:
            return
        name = quote_name(self.table)
        kinds = {each: kind for kind, each in _TYPES.items()}
        names = ["_id", "_list", "_vector", *types]
        listed = ", ".join(map(quote_name, names))
        replaced = ", ".join(f"{quote_name(each)} = EXCLUDED.{quote_name(each)}" for each in names[1:])
        with self._errors(), self._connect().transaction() as transaction:
            connection = transaction.connection
            new = [each for each in types if each not in held]
            # No other program computes centers meanwhile. A new column needs the stronger lock from the beginning: two programs that
            # hold the weaker one would wait for each other.
            connection.execute(f"LOCK TABLE {name} IN {'ACCESS' if new else 'ROW'} EXCLUSIVE MODE")
            self._refresh()
            for each in new:
                collation = ' COLLATE "C"' if types[each] is str else ""
                connection.execute(f"ALTER TABLE {name} ADD COLUMN IF NOT EXISTS {quote_name(each)} {kinds[types[each]]}{collation}")
            connection.execute(f"CREATE TEMP TABLE unimetric_rows (LIKE {name}) ON COMMIT DROP")
            with connection.cursor().copy(f"COPY unimetric_rows ({listed}) FROM STDIN (FORMAT BINARY)") as copy:
                copy.set_types(["text", "int4", self._vector_type, *(_BINARY[types[each]] for each in types)])
                for row in zip(ids, _nearest_lists(vectors, self._centers), vectors, *(values[each] for each in types), strict=True):
                    copy.write_row(row)
            connection.execute(
                f"INSERT INTO {name} ({listed}) SELECT {listed} FROM unimetric_rows ON CONFLICT (_id) DO UPDATE SET {replaced}"
            )

    @contextmanager
    def _snapshot(self) -> Iterator[None]:
        """Read centers and points of one moment, even if another program replaces them."""
        from psycopg import IsolationLevel

        connection = self._connect()
        connection.isolation_level = IsolationLevel.REPEATABLE_READ  # of the next transaction
        try:
            with connection.transaction():
                yield
        finally:
            if not connection.closed:
                connection.isolation_level = None

    def delete(self, ids: Sequence[str]) -> None:
        with self._errors():
            self._connect().execute(f"DELETE FROM {quote_name(self.table)} WHERE _id = ANY(%s)", [check_ids(ids)])

    # --- Searching ----------------------------------------------------------------------------------------

    def search(self, queries: Float[np.ndarray, "Q D"], k: int, where: Filter = None) -> tuple[np.ndarray, Float[np.ndarray, "Q k"]]:
        queries = check_queries(queries, k, self.dim)
        where = read_filter(where, self.columns)
        with self._errors(), self._snapshot():
            self._refresh()
            settings = tuned(self.report, k, recall=self.recall, place=self._place)
            if settings is not None and where is not None:
                # If one in ten points passes, the k nearest of them are among about the 10 k nearest points. Twice as many are spare.
                wanted = 2 * k / self._passing(where)
                settings = next((self.report["settings"].get(str(depth)) for depth in _DEPTHS if wanted <= depth), None)
            if settings is None or 2 * settings["probes"] > len(self._centers):
                return self._scan_exactly(queries, k, where)
            return self._search_lists(queries, k, where, settings["probes"])

    def _passing(self, where: Where) -> float:
        """Return the fraction of points that pass a filter, as PostgreSQL estimates it."""
        text, values = to_sql(where)
        counts = []
        for condition, bound in ((f"WHERE {text}", values), ("", [])):
            query = f"EXPLAIN (FORMAT JSON) SELECT 1 FROM {quote_name(self.table)} {condition}"
            counts.append(_value(self._connect().execute(query, bound))[0]["Plan"]["Plan Rows"])
        return min(1.0, max(1, counts[0]) / max(1, counts[1]))

    def _search_lists(
        self, queries: Float[np.ndarray, "Q D"], k: int, where: Where | None, probes: int
    ) -> tuple[np.ndarray, Float[np.ndarray, "Q k"]]:
        """Score the points of the nearest lists. Queries with too few results are scanned exactly."""
        lists = _order_lists(queries, self._centers)[:, :probes]
        ids, scores = self._ask(queries, k, where, lists)
        short = np.flatnonzero(scores[:, -1] == -np.inf)
        if len(short):
            ids[short], scores[short] = self._scan_exactly(queries[short], k, where)
        return ids, scores

    def _scan_exactly(self, queries: Float[np.ndarray, "Q D"], k: int, where: Where | None) -> tuple[np.ndarray, Float[np.ndarray, "Q k"]]:
        """Search in all points: few queries on the server, many with one pass over the table."""
        if len(queries) > 16:
            return exact_search(self._blocks(where), queries, k)
        return self._ask(queries, k, where)

    def _ask(
        self, queries: Float[np.ndarray, "Q D"], k: int, where: Where | None, lists: Int[np.ndarray, "Q P"] | None = None
    ) -> tuple[np.ndarray, Float[np.ndarray, "Q k"]]:
        """Run one query of SQL per vector in a snapshot, on the points of its lists or on all."""
        text, values = ("true", []) if where is None else to_sql(where)
        if lists is not None:
            text = f"_list = ANY(%s::integer[]) AND ({text})"
        query = f"SELECT _id, -(_vector <#> %s) FROM {quote_name(self.table)} WHERE {text} ORDER BY _vector <#> %s LIMIT %s"
        ids, scores = no_hits(len(queries), k)
        connection = self._connect()
        connection.execute(f"SET LOCAL enable_seqscan = {'on' if lists is None else 'off'}")
        for row, vector in enumerate(queries):
            chosen = [] if lists is None else [[0, *lists[row].tolist()]]  # list 0 has the points that other programs have added
            found = connection.execute(query, [vector, *chosen, *values, vector, k], binary=True).fetchall()
            for place, (each, score) in enumerate(found):
                ids[row, place], scores[row, place] = each, score
        return ids, scores

    def _blocks(self, where: Where | None = None) -> Iterator[Block]:
        """Yield the vectors of the points that pass a filter, and functions that return their ids."""
        for rows in self._pages([], where, _BLOCK):
            names = [row[0] for row in rows]
            yield _matrix([row[1] for row in rows], self.dim), functools.partial(_chosen, names)

    def _pages(self, columns: Sequence[str], where: Where | None, batch: int) -> Iterator[list[tuple[Any, ...]]]:
        """Yield the points by id, some at a time. Each page is a separate query."""
        text, values = ("true", []) if where is None else to_sql(where)
        listed = "".join(f", {quote_name(each)}" for each in columns).replace("%", "%%")
        query = f"SELECT _id, vector_send(_vector){listed} FROM {quote_name(self.table)} WHERE _id > %s AND {text} ORDER BY _id LIMIT %s"
        last = ""
        while rows := self._connect().execute(query, [last, *values, batch], binary=True).fetchall():
            yield rows
            last = rows[-1][0]

    # --- Reading ------------------------------------------------------------------------------------------

    def fetch(self, ids: Sequence[str]) -> dict[str, list[Any]]:
        names = list(self.columns)
        rows = self._rows(ids, "".join(f", {quote_name(name)}" for name in names))
        return {name: [row[number] for row in rows] for number, name in enumerate(names, 1)}

    def vectors(self, ids: Sequence[str]) -> Float[np.ndarray, "N D"]:
        return _matrix([row[1] for row in self._rows(ids, ", vector_send(_vector)")], self.dim)

    def _rows(self, ids: Sequence[str], listed: str) -> list[tuple[Any, ...]]:
        """Return some columns of the points with these ids, in this order."""
        ids = check_ids(ids)
        query = f"SELECT _id{listed} FROM {quote_name(self.table)} WHERE _id = ANY(%s)".replace("%", "%%").replace("ANY(%%s)", "ANY(%s)")
        with self._errors():
            found = {row[0]: row for row in self._connect().execute(query, [ids], binary=True).fetchall()}
        for each in ids:
            if each not in found:
                raise unknown_id(each)
        return [found[each] for each in ids]

    def scan(self, batch: int = 4096) -> Iterator[tuple[list[str], Float[np.ndarray, "N D"], dict[str, list[Any]]]]:
        names = list(self.columns)
        pages = self._pages(names, None, batch)
        while True:
            with self._errors():
                rows = next(pages, [])
            if not rows:
                return
            columns = {name: [row[number] for row in rows] for number, name in enumerate(names, 2)}
            yield [row[0] for row in rows], _matrix([row[1] for row in rows], self.dim), columns

    # --- Finishing ----------------------------------------------------------------------------------------

    def finish(self) -> None:
        rows = len(self)
        indexed = rows >= _INDEXED and self.recall < 1
        with self._errors():
            self._connect().execute(f"VACUUM (ANALYZE) {quote_name(self.table)}")
            notes = self._refresh()
            if self.report.get("changes") == self._changes() and (not indexed or is_tuned(self.report, self.recall)):
                return
            if indexed and rows >= 2 * notes["trained"]:
                self._make_lists(rows)
            if indexed:
                self._sort_points()
            changed = self._changes()  # before the tuning, which later writes are not part of
            settings = self._tune(rows) if indexed else {}
            self._note({"rows": rows, "changes": changed, "settings": settings})

    def _make_lists(self, rows: int) -> None:
        """Compute centers, and assign every point to the list of the nearest one."""
        count = round(math.sqrt(rows))
        sample, _ = draw_points(self._blocks, rows, number=_SAMPLE * count)
        centers = kmeans(torch.from_numpy(sample), count, iterations=10).centers.numpy()
        name, index = quote_name(self.table), quote_name(f"{self.table}_list")
        update = f"UPDATE {name} SET _list = new.list FROM unnest(%s::text[], %s::integer[]) AS new (id, list) WHERE _id = new.id"
        connection = self._connect()
        with connection.transaction():
            connection.execute(f"LOCK TABLE {name} IN SHARE ROW EXCLUSIVE MODE")  # searches are answered, writes wait
            notes = self._notes()  # another program may have computed centers meanwhile
            version = notes["version"] + 1
            connection.execute(f"DELETE FROM {self._lists}")
            values = [(version, number, center) for number, center in enumerate(centers, 1)]
            connection.cursor().executemany(f"INSERT INTO {self._lists} VALUES (%s, %s, %s)", values)
            for page in self._pages([], None, _BLOCK):
                lists = _nearest_lists(_matrix([row[1] for row in page], self.dim), centers)
                connection.execute(update, [[row[0] for row in page], lists])
            connection.execute(f"DROP INDEX IF EXISTS {index}")
            connection.execute(f"CREATE INDEX {index} ON {name} (_list)")
            self._write_notes(notes | {"version": version, "trained": rows, "report": {}})  # searches are exact until it is tuned
        self._refresh()

    def _sort_points(self) -> None:
        """Sort the table by lists, if this has not been done.

        It also removes the space of earlier versions of its rows.
        """
        name, index = quote_name(self.table), quote_name(f"{self.table}_list")
        if not _value(self._connect().execute("SELECT indisclustered FROM pg_index WHERE indexrelid = to_regclass(%s)", [index])):
            self._connect().execute(f"CLUSTER {name} USING {index}")
            self._connect().execute(f"VACUUM (ANALYZE) {name}")

    def _tune(self, rows: int) -> dict[str, dict[str, Any]]:
        """Return the numbers of lists that reach the recall, by the number of neighbors."""
        settings = {}
        ladder = [*(probes for probes in _PROBES if probes < len(self._centers)), len(self._centers)]
        for depth, queries in _DEPTHS.items():
            truth = draw_truth(self._blocks, rows, k=depth, queries=2 * queries)
            probes, measured = tune(ladder, self._with, truth, self.recall)
            settings[str(depth)] = {"probes": probes, **measured}
        return settings

    def _with(self, probes: int) -> Search:
        """Return the search in a number of lists."""

        def search(queries: Float[np.ndarray, "Q D"], k: int) -> tuple[np.ndarray, Float[np.ndarray, "Q k"]]:
            with self._snapshot():
                return self._search_lists(queries, k, None, probes)

        return search

    def _changes(self) -> str:
        """Return a number that grows with every committed write of the table."""
        query = f"SELECT coalesce(max(xmin::text::bigint), 0) || ':' || count(*) FROM {quote_name(self.table)}"
        return str(_value(self._connect().execute(query)))


_BINARY = {str: "text", int: "int8", float: "float8", bool: "bool"}


def _is_open(connection: Any) -> bool:
    """Return whether a connection can be used.

    In a transaction, it is not checked: the next query fails if it cannot.
    """
    from psycopg import OperationalError
    from psycopg.pq import TransactionStatus

    if connection.closed:
        return False
    if connection.info.transaction_status == TransactionStatus.IDLE:
        try:
            for _ in range(2):  # the first reads the notice of a server that stops
                connection.pgconn.consume_input()  # does not wait, and fails if the server has closed the connection
        except OperationalError:
            return False
    return True


def _value(cursor: Any) -> Any:
    """Return the first value of the first row of a result, or None without rows."""
    row = cursor.fetchone()
    return None if row is None else row[0]


def _nearest_lists(vectors: Float[np.ndarray, "N D"], centers: Float[np.ndarray, "L D"]) -> list[int]:
    """Return the number of the list of each vector, from 1 on. 0 without lists."""
    if not len(centers):
        return [0] * len(vectors)
    points = torch.from_numpy(np.ascontiguousarray(vectors))
    return [number + 1 for number in assign(points, torch.from_numpy(centers), memory=1 << 28)[0].tolist()]


def _order_lists(queries: Float[np.ndarray, "Q D"], centers: Float[np.ndarray, "L D"]) -> Int[np.ndarray, "Q L"]:
    """Return the numbers of all lists for each query, the nearest center first."""
    return np.argsort((centers**2).sum(1) / 2 - queries @ centers.T, axis=1, kind="stable") + 1


def _chosen(names: Sequence[str], places: Sequence[int]) -> list[str]:
    """Return the names at some places."""
    return [names[each] for each in places]


def _matrix(values: Sequence[bytes], dim: int) -> Float[np.ndarray, "N D"]:
    """Return vectors in the binary format of pgvector as a matrix. Each has a head of 4 bytes."""
    found = np.frombuffer(b"".join(values), dtype=np.dtype([("head", ">u2", 2), ("vector", ">f4", dim)]))
    return np.ascontiguousarray(found["vector"], dtype=np.float32)


def _read_url(url: str) -> str:
    """Return the connection string of an argument.

    Raises:
        UnimetricError: The environment variable is not set, or the argument has a password.
    """
    try:
        from psycopg import ProgrammingError
        from psycopg.conninfo import conninfo_to_dict
    except ImportError:
        raise UnimetricError("the store `pgvector` needs psycopg", "pip install 'unimetric[pgvector]'") from None
    name = url[1:] if url.startswith("$") else ""
    text = os.environ.get(name, "") if name else url
    if name and not text:
        raise UnimetricError(f"`url`: the environment variable `{name}` is not set", f"export {name}=postgresql://user@host/database")
    try:
        given = conninfo_to_dict(text)
    except ProgrammingError:  # its message repeats the text, with the password
        raise UnimetricError("`url` is not a connection string of PostgreSQL", "write postgresql://user@host:5432/database") from None
    if "password" in given and not name:
        raise UnimetricError(
            "`url` must not have a password, because it is stored in the index", "export DATABASE_URL and use url='$DATABASE_URL'"
        )
    return text


def _describe(url: str, table: str) -> str:
    """Return the server and the table without user and password, for errors."""
    from psycopg.conninfo import conninfo_to_dict

    given = conninfo_to_dict(url)
    place = f"{given.get('host', 'localhost')}:{given.get('port', 5432)}/{given.get('dbname', '')}"
    return f"table `{table}` of {place}"
