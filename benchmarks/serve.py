"""A server under load: its overhead per request, throughput and latency of many clients, and memory.

    python benchmarks/serve.py my.index --clients 16 --seconds 60 --requests 5000

Every number is taken next to a bare one in turns of a few seconds, because other programs may use the processor: bare is decoding, model
and search of the same images by the same code, without a server. Each line has the steal, the share of the processor that the host gave
to others. Times at a high steal say little; processor time, which is printed as well, does not contain it.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil

from unimetric.deploy.gallery import Gallery, decode_upload
from unimetric.deploy.index import Index

K, PIXELS = 10, 10**8
_BOUNDARY = "b1946ac92492d2347c6235b4d2611184"


def body_of(data: bytes) -> bytes:
    """Return an upload as the body of a request. It is made once, because its cost is not the server's."""
    head = f'--{_BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'.encode()
    return head + data + f"\r\n--{_BOUNDARY}--\r\n".encode()


class Client:
    """A connection that stays open. It is far cheaper than that of httpx, whose processor time would be the server's loss."""

    def __init__(self, address: str) -> None:
        self.connection = http.client.HTTPConnection(address, timeout=60)

    def search(self, body: bytes) -> int:
        """Send a search, read the answer, and return the status."""
        self.connection.request("POST", "/search", body, {"Content-Type": f"multipart/form-data; boundary={_BOUNDARY}"})
        answer = self.connection.getresponse()
        text = answer.read()
        assert answer.status != 200 or json.loads(text)["hits"]
        return answer.status


def stolen() -> tuple[float, float]:
    """Return the ticks of the processor that the host gave to others, and all ticks. Zeros if the system does not count them."""
    with contextlib.suppress(OSError):
        ticks = [float(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        return ticks[7], sum(ticks)
    return 0.0, 0.0


class Steal:
    """Share of the processor that the host gave to others, since the start."""

    def __init__(self) -> None:
        self.begun = stolen()

    def __str__(self) -> str:
        lost, ticks = (after - before for after, before in zip(stolen(), self.begun, strict=True))
        return f"steal {100 * lost / max(ticks, 1):.0f} %"


def answer_bare(gallery: Gallery, files: list[bytes]) -> None:
    """Decode, embed and search without a server."""
    images = [decode_upload(data, "", PIXELS) for data in files]
    gallery.index.hits(*gallery.index.search_vectors(gallery.embedder.embed_images(images), K))


@contextlib.contextmanager
def in_process(path: str) -> Iterator[tuple[str, psutil.Process]]:
    """Serve an index in a process of its own."""
    words = [sys.executable, "-m", "unimetric.cli", "serve", path, "--port", "0", "--no-feedback"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip().rstrip("/").removeprefix("http://"), psutil.Process(process.pid)
        process.terminate()


def processor_of(process: psutil.Process) -> float:
    """Return the seconds of the processor that a process has used."""
    used = process.cpu_times()
    return used.user + used.system


# --- one client --------------------------------------------------------------------------------------------------------


def measure_overhead(address: str, process: psutil.Process, gallery: Gallery, files: list[bytes], seconds: float) -> None:
    """Print what one request takes in addition to its decoding, model and search."""
    client, bodies, steal = Client(address), [body_of(data) for data in files], Steal()
    for data, body in zip(files[:3], bodies, strict=False):
        answer_bare(gallery, [data])
        client.search(body)
    bare, served, bare_used, used = [], [], 0.0, processor_of(process)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(bare) < 20:
        each, begun, own = len(bare) % len(files), time.perf_counter(), time.process_time()
        answer_bare(gallery, [files[each]])
        bare.append(1000 * (time.perf_counter() - begun))
        bare_used += time.process_time() - own
        begun = time.perf_counter()
        client.search(bodies[each])
        served.append(1000 * (time.perf_counter() - begun))
    alone, request, used = np.median(bare), np.median(served), processor_of(process) - used
    print(
        f"one client: p50 {request:.1f} ms, bare {alone:.1f} ms, the server adds {request - alone:.1f} ms; processor "
        f"{1000 * used / len(served):.1f} ms, bare {1000 * bare_used / len(bare):.1f} ms; {len(bare)} pairs, {steal}",
        flush=True,
    )


# --- many clients ------------------------------------------------------------------------------------------------------


def load(address: str, bodies: list[bytes], clients: int, *, seconds: float = 1e9, requests: int = 10**9) -> tuple[list[float], list[int]]:
    """Return the seconds and the status of each request of many clients, for a time or a number of requests."""
    times: list[float] = []
    statuses: list[int] = []
    end, numbers = time.perf_counter() + seconds, iter(range(requests))

    def work() -> None:
        client = Client(address)
        while time.perf_counter() < end and (number := next(numbers, None)) is not None:
            begun = time.perf_counter()
            statuses.append(client.search(bodies[number % len(bodies)]))
            times.append(time.perf_counter() - begun)

    threads = [threading.Thread(target=work) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return times, statuses


def measure_load(address: str, process: psutil.Process, gallery: Gallery, files: list[bytes], *, clients: int, seconds: float) -> None:
    """Print throughput and latency of many clients, in turns with the same batches without a server."""
    bodies, own, steal = [body_of(data) for data in files], psutil.Process(), Steal()
    load(address, bodies, clients, requests=4 * clients)
    times, statuses, rates, bare_rates, cpu, bare_cpu = [], [], [], [], [], []
    turns = 5
    for _ in range(turns):
        count, begun, used = 0, time.perf_counter(), processor_of(own)
        while time.perf_counter() - begun < seconds / turns or not count:
            answer_bare(gallery, [files[(count + each) % len(files)] for each in range(clients)])
            count += clients
        bare_rates.append(count / (time.perf_counter() - begun))
        bare_cpu.append((processor_of(own) - used) / count)
        begun, used = time.perf_counter(), processor_of(process)
        some, answers = load(address, bodies, clients, seconds=seconds / turns)
        rates.append(len(some) / (time.perf_counter() - begun))
        cpu.append((processor_of(process) - used) / len(some))
        times += some
        statuses += answers
    middle, late = (1000 * float(np.quantile(times, part)) for part in (0.5, 0.99))
    rate, bare = float(np.median(rates)), float(np.median(bare_rates))
    print(
        f"{clients} clients: {rate:.1f} images/s, bare {bare:.1f} in batches of {clients}, ratio {rate / bare:.2f}; p50 {middle:.0f} ms, "
        f"p99 {late:.0f} ms, ratio {late / middle:.1f}; processor {1000 * np.median(cpu):.1f} ms per image, bare "
        f"{1000 * np.median(bare_cpu):.1f} ms; statuses { ({each: statuses.count(each) for each in set(statuses)}) }, {steal}",
        flush=True,
    )


def measure_memory(address: str, process: psutil.Process, files: list[bytes], *, clients: int, requests: int) -> None:
    """Print the memory of the server after blocks of 1,000 requests."""
    bodies = [body_of(data) for data in files]
    for block in range(0, requests, 1000):
        steal = Steal()
        load(address, bodies, clients, requests=min(1000, requests - block))
        found = process.memory_info()  # pages of files in memory are not of the server alone
        print(
            f"{block + 1000:,} requests: memory {(found.rss - found.shared) / 2**20:.0f} MiB, with files {found.rss / 2**20:.0f}, {steal}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("index")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=60, help="time of each measurement")
    parser.add_argument("--requests", type=int, default=5000, help="number of requests of the measurement of memory; 0 for none")
    arguments = parser.parse_args()
    with Index.open(arguments.index) as index:
        ids = next(iter(index.store.scan()))[0][:64]
        files = [Path(index.image_path(id_)).read_bytes() for id_ in ids]
        with in_process(arguments.index) as (address, process):
            gallery = Gallery(index)
            measure_overhead(address, process, gallery, files, arguments.seconds)
            measure_load(address, process, gallery, files, clients=arguments.clients, seconds=2 * arguments.seconds)
            measure_memory(address, process, files, clients=arguments.clients, requests=arguments.requests)


if __name__ == "__main__":
    main()
