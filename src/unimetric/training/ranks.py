"""Stop all ranks of a run when one of them is killed or hangs.

A rank that waits for a lost one in a collective operation waits for half an hour. Here each rank holds a connection to
the first one, and sends a byte over it every few seconds. The system closes the connection of a killed process at once.
A process that is stopped, or whose machine is lost, stays silent.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import struct
import sys
import threading
import time
from typing import Any

from unimetric.errors import explain
from unimetric.runs.device import Fabric

#: Messages of ranks: alive, finished, ended with an error, and stop now.
_ALIVE, _DONE, _FAILED, _STOP = b".", b"d", b"e", b"s"

#: Environment variable with the process of the first rank, for the ranks that it starts.
_FIRST = "UNIMETRIC_FIRST_RANK"

#: Token, rank and process of a rank, sent once; the name of its machine follows.
_HELLO = struct.Struct("!16sII64s")


class RankWatch:
    """Launch of all ranks of a run, and a context in which all end if one of them is lost.

    The value of the context is whether this is the first rank.

    Args:
        fabric: Fabric of the run, before its launch. With one rank, nothing is watched.
    """

    def __init__(self, fabric: Fabric) -> None:
        self.fabric, self.over, self.lock = fabric, threading.Event(), threading.Lock()
        # Seconds without a byte after which a rank counts as hung.
        self.silence = float(os.environ.get("UNIMETRIC_RANK_SILENCE", "30"))
        self.peers: dict[int, socket.socket] = {}
        self.failed: int | None = None  # rank that has ended with an error, which it has printed
        self.local: dict[int, int] = {}  # processes of the ranks on this machine

    def __enter__(self) -> bool:
        first = int(os.environ.pop(_FIRST, "0"))
        os.environ[_FIRST] = str(os.getpid())
        connected = threading.Event()
        threading.Thread(target=self._watch_start, args=(first, connected), daemon=True).start()
        try:
            self.fabric.launch()
            if self.fabric.world_size > 1:
                self._connect()
        except (RuntimeError, OSError):  # also if a rank is lost, which `_watch_start` reports
            time.sleep(1)
            raise
        finally:
            connected.set()
            del os.environ[_FIRST]
        for rank in self.peers:
            threading.Thread(target=self._listen, args=(rank,), daemon=True).start()
        if self.peers:
            threading.Thread(target=self._beat, daemon=True).start()
        return self.fabric.global_rank == 0

    def _watch_start(self, first: int, connected: threading.Event) -> None:
        """Stop this rank if another one on this machine ends before all are connected.

        Args:
            first: Process of the first rank if it has started this one, else 0.
            connected: Event after which the connections are watched.
        """
        launcher: Any = self.fabric.strategy.launcher
        started = launcher.procs if type(launcher).__name__ == "_SubprocessScriptLauncher" else ()  # others start no processes here
        while not connected.wait(0.2):
            if first and os.name == "posix" and os.getppid() != first:
                self._stop(0, "was killed or has crashed")
            for rank, process in enumerate(started, 1):
                if process.poll():
                    self._stop(rank, "was killed or has crashed" if process.returncode < 0 else "has ended with an error")

    def _connect(self) -> None:
        """Connect every rank with the first one."""
        main, name = self.fabric.global_rank == 0, socket.gethostname().encode()[:64]
        host = os.environ.get("MASTER_ADDR", "127.0.0.1")
        local = host in ("127.0.0.1", "localhost")
        server = socket.create_server(("127.0.0.1" if local else "", 0)) if main else None
        known = (server.getsockname()[1], secrets.token_bytes(16), os.getpid(), name) if server else (0, b"", 0, b"")
        port, token, process, machine = self.fabric.broadcast(known)
        if server is None:
            peer = socket.create_connection((host, port), timeout=60)
            peer.sendall(_HELLO.pack(token, self.fabric.global_rank, os.getpid(), name))
            self.local = {0: process} if machine == name else {}
            self.peers[0] = peer
            return
        with server:
            server.settimeout(60)
            while len(self.peers) < self.fabric.world_size - 1:
                peer = server.accept()[0]
                peer.settimeout(10)
                try:
                    given, rank, process, machine = _HELLO.unpack(peer.recv(_HELLO.size, socket.MSG_WAITALL))
                except (OSError, struct.error):  # not a rank, such as a port scanner
                    given = b""
                if not secrets.compare_digest(given, token):
                    peer.close()
                    continue
                self.peers[rank] = peer
                if machine.rstrip(b"\0") == name:
                    self.local[rank] = process
        for thread in threading.enumerate():
            if thread.name == "child-process-observer":  # Lightning's, which kills this process without a word if a rank dies
                thread._finished = True  # type: ignore[attr-defined]

    def _beat(self) -> None:
        while not self.over.wait(self.silence / 10):
            self._send(_ALIVE)

    def _send(self, message: bytes) -> None:
        for peer in list(self.peers.values()):
            try:
                peer.sendall(message)
            except OSError:  # the listener reports it
                continue

    def _listen(self, rank: int) -> None:
        """Wait for the messages of a rank until it finishes or is lost."""
        peer = self.peers[rank]
        peer.settimeout(self.silence)
        while not self.over.is_set():
            try:
                message = peer.recv(64)
            except TimeoutError:
                return self._stop(rank, f"has not responded for {self.silence:g} seconds", hung=True)
            except OSError:
                message = b""
            if _DONE in message:
                return None
            if _STOP in message:  # the first rank has printed the reason
                os._exit(2)
            if _FAILED in message:  # this rank may be about to print the same error, and end by itself
                self.failed = rank
                return None if self.over.wait(15) else self._stop(rank, "has ended with an error")
            if not message:
                return self._stop(rank, "was killed or has crashed")
        return None

    def _stop(self, rank: int, problem: str, *, hung: bool = False) -> None:
        """Print a sentence and end this process, whose main thread may wait for the lost rank."""
        with self.lock:
            if self.over.is_set():
                return
            self.over.set()
            ranks = max(self.fabric.world_size, int(os.environ.get("WORLD_SIZE", "1")))  # Fabric learns it at the end of its launch
            text = f"\nerror: rank {rank} of {ranks} {problem}, so that all ranks stop\n\n"
            hint = "hint: run the same command to resume from the last checkpoint, with this or another number of devices\n"
            sys.stdout.flush()
            os.write(2, (text + hint).encode())
            self._send(_STOP)
            if hung and rank in self.local:
                os.kill(self.local[rank], signal.SIGKILL)  # it would hold its memory
            os._exit(2)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None = None, *_: Any) -> None:
        if not self.peers:
            return
        expected = isinstance(error, Exception) and explain(error) is not None
        if expected and self.fabric.global_rank > 0:  # if the first rank raises an error as well, it prints it
            deadline = time.monotonic() + 10
            while self.failed is None and time.monotonic() < deadline:
                time.sleep(0.1)
        elif isinstance(error, RuntimeError) and not expected:  # the error of a collective operation, if a rank is lost
            time.sleep(5)
            if self.failed is not None:
                self._stop(self.failed, "has ended with an error")
        self.over.set()
        self._send(_DONE if kind is None else _FAILED)
        for peer in self.peers.values():
            peer.close()
        if expected and self.failed is not None and self.fabric.global_rank > 0:
            sys.exit(2)
