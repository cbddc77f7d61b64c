"""The connection to Ray: a dead address is an error at once, and a local cluster is not reachable from other machines."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from unimetric.cli import app
from unimetric.errors import UnimetricError
from unimetric.runs.cluster import connect


@pytest.mark.parametrize("prefix", ["", "ray://"])
def test_dead_address_is_an_error_at_once(prefix: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"{prefix}127.0.0.1:{free.getsockname()[1]}"
    began = time.monotonic()
    with pytest.raises(UnimetricError, match=f"no Ray cluster at '{address}'") as refused:
        connect(address)
    assert time.monotonic() - began < 11
    assert "--ray local" in refused.value.hint


def test_bench_names_a_dead_address(grid: Path, tmp_path: Path) -> None:
    shown = CliRunner().invoke(app, ["bench", str(grid), "--out", str(tmp_path / "study"), "--ray", "127.0.0.1:1"])
    assert "no Ray cluster at '127.0.0.1:1'" in shown.output + str(shown.exception)
    assert not (tmp_path / "study").exists()


LISTEN = """
import json, psutil
from unimetric.runs.cluster import connect

ray = connect("local")
assert ray.get(ray.remote(lambda: 1).remote()) == 1
me = psutil.Process()
found = []
for process in [me, *me.children(recursive=True)]:
    try:
        found += [each.laddr.ip for each in process.net_connections("inet") if each.status == psutil.CONN_LISTEN]
    except psutil.NoSuchProcess:
        pass
print(json.dumps(found))
ray.shutdown()
"""


def test_local_cluster_listens_on_loopback_only() -> None:
    pytest.importorskip("ray", reason="Ray is not installed")
    pytest.importorskip("psutil", reason="psutil is not installed")
    environment = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    done = subprocess.run([sys.executable, "-c", LISTEN], capture_output=True, text=True, env=environment, timeout=180, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    addresses = json.loads(done.stdout.splitlines()[-1])
    assert len(addresses) >= 4, addresses
    assert set(addresses) <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}, addresses
