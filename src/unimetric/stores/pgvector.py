"""Store in a table of PostgreSQL with the extension pgvector."""

from __future__ import annotations

import functools
import json
import math
import os
import re
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import MappingProxyType
from typing import Annotated, Any, Literal

import numpy as np
from jaxtyping import Float

from unimetric.arguments import Form, Range
from unimetric.errors import UnimetricError
from unimetric.kinds import Store
from unimetric.stores._points import check_ids, check_points, check_vectors, no_hits, unknown_id
from unimetric.stores._recall import DEPTHS, Block, Search, Truth, draw_truth, exact_search, is_tuned, tune, tuned
from unimetric.stores._where import Where, check, quote_name, to_sql

#: Version of the layout, in the comment of the table.
_FORMAT = 1
#: With fewer points, a scan is about as fast as an index.
_INDEXED = 20_000
#: Candidates of a search, by ascending cost and recall. Up to `_LIST` they are the list of the search (`hnsw.ef_search`).
#: Beyond that, which PostgreSQL does not allow, a search reads on until it has seen as many.
_LADDER = (20, 40, 60, 80, 100, 150, 200, 300, 400, 600, 800, 1000, 2000, 4000, 8000)
_LIST = 1000
#: Graphs by ascending density: links of a point, candidates while it is inserted, and the number of points from which on it is the first
#: to be built. With too few links, some of many points cannot be reached, however long a search is.
_GRAPHS = ((16, 100, 0), (32, 200, 400_000))
#: Points that the index may read for one query. If k of them do not pass the filter, all points are scanned.
_SCANNED = 200_000
#: Largest dimension of an index.
_LARGEST = {"vector": 2_000, "halfvec": 4_000}
#: Candidates per neighbor whose scores are computed in float32, if the index has half precision.
_REFINE = 3
_BLOCK = 8_192
_TYPES = {"text": str, "bigint": int, "double precision": float, "boolean": bool}


class Pgvector(Store):
    """Table of PostgreSQL with an HNSW index that is tuned to a required recall.

    The table has the columns `_id`, `_vector` (float32) and those of the points, so that other programs can
    read it. Every write is one transaction. `finish` cleans the table, builds the index from 20,000 points
    on, and increases the number of candidates of a search (`hnsw.ef_search`) until it finds the required
    fraction of exact neighbors. If no number does, the index is built again with twice as many links. The
    measured recall is stored in the comment of the table.

    With a filter, `hnsw.ef_search` grows as fewer points pass, and the index is read on until k points pass
    (`hnsw.iterative_scan = strict_order`). If few points pass, or the index ends too early, the filter is applied
    first and its points are scanned exactly. An index of PostgreSQL on a filtered column speeds up that scan.

    Passwords are not part of an index: a `url` with a password is an error. Name an environment variable
    instead, such as `url='$DATABASE_URL'`, or use a password file of PostgreSQL.

    Reference:
        Efficient and robust approximate nearest neighbor search using hierarchical navigable small world
        graphs (Malkov and Yashunin, TPAMI 2018); pgvector (Kane et al., 2021)

    Args:
        dim: Dimension of the vectors.
        url: Connection string without a password, or `$` and the name of an environment variable that has one.
        table: Name of the table.
        recall: Required fraction of the exact 10 and 100 nearest neighbors. 1 scans exactly.
        index: Precision of the index: `vector` (float32), or `halfvec` (float16) with scores in float32. Some
            builds of pgvector crash on `halfvec`, so it is tried on a separate connection before it is used.
    """

    def __init__(
        self,
        *,
        dim: Annotated[int, Range(1, 16_000)],
        url: str = "$DATABASE_URL",
        table: Annotated[str, Form(r"[a-z_][a-z0-9_]{0,47}", "up to 48 of a-z, 0-9 and _, not starting with a digit")] = "unimetric",
        recall: Annotated[float, Range(above=0, most=1)] = 0.99,
        index: Literal["vector", "halfvec"] = "vector",
    ) -> None:
        self.dim = dim
        self.table = table
        self.recall = recall
        self.index = index
        self._url = _read_url(url)
        self._place = _describe(self._url, table)
        self._open_connection: Any = None
        self.report: Mapping[str, Any] = MappingProxyType({})
        with self._errors():
            self._open()

    # --- Opening ------------------------------------------------------------------------------------------

    def _connect(self) -> Any:
        """Return the connection. A broken one is opened again."""
        import psycopg
        from psycopg.adapt import Dumper
        from psycopg.pq import Format

        connection = self._open_connection
        if connection is not None and not connection.closed and not connection.broken:
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
        # Whether the index pays depends on the values of a filter, so each query has its own plan.
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
                columns = f'_id text COLLATE "C" PRIMARY KEY, _vector vector({self.dim}) NOT NULL'
                connection.execute(f"CREATE TABLE {name} ({columns})")
                # Vectors are incompressible, and reading them from another file is slow.
                connection.execute(f"ALTER TABLE {name} ALTER COLUMN _vector SET STORAGE PLAIN")
                self._note({})
        notes = self._notes()
        if notes["format"] > _FORMAT:
            raise UnimetricError(f"{self._place}: written by a newer version of Unimetric", "pip install --upgrade unimetric")
        if notes["dim"] != self.dim:
            raise UnimetricError(f"{self._place}: holds vectors of dimension {notes['dim']}, got {self.dim}", "use the model of the index")
        if notes["report"].get("index", self.index) == self.index:  # otherwise, `finish` builds another index
            self.report = MappingProxyType(notes["report"])

    def _notes(self) -> dict[str, Any]:
        """Return the notes in the comment of the table, which identify it."""
        row = self._connect().execute("SELECT obj_description(to_regclass(%s))", [quote_name(self.table)]).fetchone()
        try:
            notes = json.loads(row[0])["unimetric"]
            return {"format": int(notes["format"]), "dim": int(notes["dim"]), "report": dict(notes["report"])}
        except (TypeError, ValueError, KeyError):
            raise UnimetricError(f"{self._place}: was not written by Unimetric", "use another `table`") from None

    def _note(self, report: Mapping[str, Any]) -> None:
        from psycopg import sql

        notes = {"unimetric": {"format": _FORMAT, "dim": self.dim, "report": dict(report)}}
        comment = sql.SQL("COMMENT ON TABLE {} IS {}").format(sql.Identifier(self.table), sql.Literal(json.dumps(notes)))
        self._connect().execute(comment)
        self.report = MappingProxyType(dict(report))

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Convert errors of PostgreSQL, whose first line says what happened."""
        try:
            import psycopg
        except ImportError:
            raise UnimetricError("the store `pgvector` needs psycopg", "pip install 'unimetric[pgvector]'") from None
        try:
            yield
        except psycopg.Error as error:
            text = str(error).strip().partition("\n")[0][:300]
            hint = "check the server and its logs"
            if isinstance(error, psycopg.OperationalError):
                hint = "check that the server runs, and `url`"
            if isinstance(error, psycopg.errors.UndefinedFile | psycopg.errors.FeatureNotSupported):
                hint = "install pgvector on the server"
            if isinstance(error, psycopg.errors.InsufficientPrivilege):
                hint = "let an administrator run `CREATE EXTENSION vector` and grant CREATE on the schema"
            if isinstance(error, psycopg.errors.DiskFull):
                hint = "free some space on the server"
            raise UnimetricError(f"{self._place}: {text}", hint) from None

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
        return {name: _TYPES[kind] for name, kind in rows if name not in ("_id", "_vector") and kind in _TYPES}

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
        names = ["_id", "_vector", *types]
        listed = ", ".join(map(quote_name, names))
        replaced = ", ".join(f"{quote_name(each)} = EXCLUDED.{quote_name(each)}" for each in names[1:])
        with self._errors(), self._transaction() as connection:
            for each in types:
                if each not in held:
                    collation = ' COLLATE "C"' if types[each] is str else ""
                    connection.execute(f"ALTER TABLE {name} ADD COLUMN IF NOT EXISTS {quote_name(each)} {kinds[types[each]]}{collation}")
            connection.execute(f"CREATE TEMP TABLE unimetric_rows (LIKE {name}) ON COMMIT DROP")
            with connection.cursor().copy(f"COPY unimetric_rows ({listed}) FROM STDIN (FORMAT BINARY)") as copy:
                copy.set_types(["text", self._vector_type, *(_BINARY[types[each]] for each in types)])
                for row in zip(ids, vectors, *(values[each] for each in types), strict=True):
                    copy.write_row(row)
            connection.execute(
                f"INSERT INTO {name} ({listed}) SELECT {listed} FROM unimetric_rows ON CONFLICT (_id) DO UPDATE SET {replaced}"
            )

    @contextmanager
    def _transaction(self) -> Iterator[Any]:
        connection = self._connect()
        with connection.transaction():
            yield connection

    def delete(self, ids: Sequence[str]) -> None:
        with self._errors():
            self._connect().execute(f"DELETE FROM {quote_name(self.table)} WHERE _id = ANY(%s)", [check_ids(ids)])

    # --- Searching ----------------------------------------------------------------------------------------

    def search(self, queries: Float[np.ndarray, "Q D"], k: int, where: Any = None) -> tuple[np.ndarray, Float[np.ndarray, "Q k"]]:
        queries = check_vectors(queries, self.dim)
        where = None if where is None else check(where, self.columns)
        settings = tuned(self.report, k, recall=self.recall, place=self._place)
        with self._errors():
            passing = 1.0 if where is None else self._passing(where)
            if settings is None:
                return self._scan_exactly(queries, k, where)
            tuned_size = settings["ef_search"]
            size = tuned_size if where is None else math.ceil(2 * tuned_size / passing)
            # A strict order drops points that are found too late, so a search that reads on for long would miss some.
            if k / passing > _LIST / 2 or (tuned_size > _LIST and size > _LADDER[-1]):
                return self._scan_exactly(queries, k, where)
            if tuned_size <= _LIST:
                size = min(size, _LIST)
            return self._search_index(queries, k, where, size, math.ceil(passing * size))

    def _passing(self, where: Where) -> float:
        """Return the fraction of points that pass a filter, as PostgreSQL estimates it."""
        text, values = to_sql(where)
        counts = []
        for condition, bound in ((f"WHERE {text}", values), ("", [])):
            query = f"EXPLAIN (FORMAT JSON) SELECT 1 FROM {quote_name(self.table)} {condition}"
            counts.append(_value(self._connect().execute(query, bound))[0]["Plan"]["Plan Rows"])
        return min(1.0, max(1, counts[0]) / max(1, counts[1]))

    def _search_index(
        self, queries: Float[np.ndarray, "Q D"], k: int, where: Where | None, size: int, passing: int
    ) -> tuple[np.ndarray, Float[np.ndarray, "Q k"]]:
        """Search with the index. Queries with too few results are scanned exactly.

        Args:
            queries: Vectors to search with.
            k: Number of neighbors.
            where: Filter, or None.
            size: Number of candidates.
            passing: Number of candidates that pass the filter.
        """
        # More candidates than the list holds are read in any order and sorted again, as are those of half precision.
        read = 0 if size <= _LIST else passing
        if self.index == "halfvec":
            read = max(read, _REFINE * k)
        settings = {
            "enable_seqscan": "off",
            "enable_sort": "on" if read else "off",
            "hnsw.ef_search": min(size, _LIST),
            "hnsw.iterative_scan": "strict_order" if size <= _LIST else "relaxed_order",
            "hnsw.max_scan_tuples": _SCANNED,
        }
        ids, scores = self._ask(queries, k, where, settings, read=read)
        short = np.flatnonzero(scores[:, -1] == -np.inf)
        if len(short):
            ids[short], scores[short] = self._scan_exactly(queries[short], k, where)
        return ids, scores

    def _scan_exactly(self, queries: Float[np.ndarray, "Q D"], k: int, where: Where | None) -> tuple[np.ndarray, Float[np.ndarray, "Q k"]]:
        """Search without the index: few queries on the server, many with one pass over the table."""
        if len(queries) > 16:
            return exact_search(self._blocks(where), queries, k)
        return self._ask(queries, k, where, {"enable_indexscan": "off"})

    def _ask(
        self, queries: Float[np.ndarray, "Q D"], k: int, where: Where | None, settings: Mapping[str, Any], *, read: int = 0
    ) -> tuple[np.ndarray, Float[np.ndarray, "Q k"]]:
        """Run one query of SQL per vector.

        If `read` is not 0, the best of so many points of the index are returned.
        """
        text, values = ("true", []) if where is None else to_sql(where)
        name = quote_name(self.table)
        query = f"SELECT _id, -(_vector <#> %s) FROM {name} WHERE {text} ORDER BY _vector <#> %s LIMIT %s"
        if read:
            form = f"::halfvec({self.dim})" if self.index == "halfvec" else ""
            near = f"_vector{form} <#> %s{form}"
            inner = f"SELECT _id, _vector FROM {name} WHERE {text} ORDER BY {near} LIMIT %s"
            query = f"SELECT _id, -(_vector <#> %s) AS score FROM ({inner}) AS near ORDER BY score DESC LIMIT %s"
        ids, scores = no_hits(len(queries), k)
        with self._transaction() as connection:
            for key, value in settings.items():
                connection.execute("SELECT set_config(%s, %s, true)", [key, str(value)])
            for row, vector in enumerate(queries):
                bound = [vector, *values, vector, read, k] if read else [vector, *values, vector, k]
                found = connection.execute(query, bound, binary=True).fetchall()
                for place, (each, score) in enumerate(found):
                    ids[row, place], scores[row, place] = each, score
        return ids, scores

    def _blocks(self, where: Where | None = None) -> Iterator[Block]:
        """Yield the vectors of the points that pass a filter, and functions that return their ids."""
        for rows in self._pages([], where, _BLOCK):
            names = [row[0] for row in rows]
            yield _matrix([row[1] for row in rows], self.dim), functools.partial(_chosen, names)

    def _pages(self, columns: Sequence[str], where: Where | None, batch: int) -> Iterator[list[tuple[Any, ...]]]:
        """Yield the points by id, some at a time. Each page is a query without a lock."""
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
        with self._errors():
            for rows in self._pages(names, None, batch):
                columns = {name: [row[number] for row in rows] for number, name in enumerate(names, 2)}
                yield [row[0] for row in rows], _matrix([row[1] for row in rows], self.dim), columns

    # --- Finishing ----------------------------------------------------------------------------------------

    def finish(self) -> None:
        rows = len(self)
        indexed = rows >= _INDEXED and self.recall < 1 and self.dim <= _LARGEST[self.index]
        with self._errors():
            self._connect().execute(f"VACUUM (ANALYZE) {quote_name(self.table)}")
            changed = self._changes()
            if self.report.get("changes") == changed and (not indexed or is_tuned(self.report, self.recall)):
                return
            self._note({})
            settings = self._tune(rows) if indexed else {}
            self._note({"rows": rows, "changes": changed, "index": self.index, "settings": settings})

    def _tune(self, rows: int) -> dict[str, dict[str, Any]]:
        """Build the index and return its settings.

        If none reaches the recall, a denser graph is built.
        """
        truths = [draw_truth(self._blocks, rows, k=depth, queries=2 * queries) for depth, queries in DEPTHS.items()]
        built = self._links()
        first = [graph for graph in _GRAPHS if graph[0] == built] or [graph for graph in _GRAPHS if graph[2] <= rows]
        *sparse, densest = _GRAPHS[_GRAPHS.index(first[-1]) :]
        for links, candidates, _ in sparse:
            self._build_index(links, candidates)
            with suppress(UnimetricError):
                return self._settings(truths)
        self._build_index(*densest[:2])
        return self._settings(truths)

    def _links(self) -> int:
        """Return the number of links per point of the index, 0 if there is none."""
        query = "SELECT coalesce(reloptions, '{}') FROM pg_class WHERE oid = to_regclass(%s)"
        options = _value(self._connect().execute(query, [quote_name(f"{self.table}_{self.index}_hnsw")]))
        return 0 if options is None else int(dict(option.split("=") for option in options).get("m", 16))

    def _settings(self, truths: Sequence[Truth]) -> dict[str, dict[str, Any]]:
        """Return the settings of the index that reach the recall, by the number of neighbors."""
        settings = {}
        for truth in truths:
            ladder = [size for size in _LADDER if size >= min(truth.k, 40)]
            size, measured = tune(ladder, self._with, truth, self.recall)
            # The graph links stored points to their neighbors, so new queries need somewhat more candidates.
            size = ladder[min(ladder.index(size) + 1, len(ladder) - 1)]
            settings[str(truth.k)] = {"ef_search": size, **measured}
        return settings

    def _changes(self) -> str:
        """Return a number that grows with every committed write of the table."""
        query = f"SELECT coalesce(max(xmin::text::bigint), 0) || ':' || count(*) FROM {quote_name(self.table)}"
        return str(_value(self._connect().execute(query)))

    def _with(self, size: int) -> Search:
        """Return the search with a size of the candidate list."""
        return lambda queries, k: self._search_index(queries, k, None, size, size)

    def _build_index(self, links: int, candidates: int) -> None:
        """Build the index, unless it has so many links per point."""
        import psycopg

        form, operators = "_vector", "vector_ip_ops"
        if self.index == "halfvec":
            self._probe_halfvec()
            form, operators = f"(_vector::halfvec({self.dim}))", "halfvec_ip_ops"
        name, other = (quote_name(f"{self.table}_{each}_hnsw") for each in (self.index, _OTHER[self.index]))
        made = f"hnsw ({form} {operators}) WITH (m = {links}, ef_construction = {candidates})"
        query = f"CREATE INDEX IF NOT EXISTS {name} ON {quote_name(self.table)} USING {made}"
        for workers in (2, 0):
            try:
                with self._transaction() as connection:
                    for key, least in {"maintenance_work_mem": 1 << 20, "max_parallel_maintenance_workers": workers}.items():
                        # A larger setting of the server is kept: a graph that does not fit into memory is built far more slowly.
                        chosen = "greatest(setting::bigint, %s)" if least else "%s"
                        connection.execute(
                            f"SELECT set_config(name, ({chosen})::text, true) FROM pg_settings WHERE name = %s", [least, key]
                        )
                    if self._links() != links:
                        connection.execute(f"DROP INDEX IF EXISTS {name}")
                    connection.execute(query)
                    connection.execute(f"DROP INDEX IF EXISTS {other}")
                return
            except psycopg.OperationalError as error:
                # Workers share memory, which a container may limit, and some builds of pgvector crash in them: a lost
                # connection has no state.
                if not workers or error.sqlstate not in (None, psycopg.errors.DiskFull.sqlstate):
                    raise
                self._await_server()

    def _await_server(self) -> None:
        """Connect again, for up to a minute, while the server recovers from a crash."""
        import psycopg

        self.close()
        for _ in range(60):
            time.sleep(1)  # at first, a server may accept connections that it ends when it notices the crash
            with suppress(psycopg.OperationalError):
                self._connect()
                return

    def _probe_halfvec(self) -> None:
        """Compute in half precision on a separate connection, which a broken build ends."""
        import psycopg

        ones = f"array_fill(1, ARRAY[{self.dim}])::halfvec"
        try:
            with psycopg.connect(self._url, autocommit=True, connect_timeout=10) as connection:
                connection.execute(f"SELECT {ones} <#> {ones}, {ones} <-> {ones}, {ones} <=> {ones}")
        except psycopg.OperationalError:
            self._await_server()
            raise UnimetricError(f"{self._place}: this build of pgvector crashes on halfvec", "use `index='vector'`") from None


_OTHER = {"vector": "halfvec", "halfvec": "vector"}
_BINARY = {str: "text", int: "int8", float: "float8", bool: "bool"}


def _value(cursor: Any) -> Any:
    """Return the first value of the first row of a result, or None without rows."""
    row = cursor.fetchone()
    return None if row is None else row[0]


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
