"""Load on a running server: throughput and latency of many clients, next to the model alone.

    unimetric serve my.index --port 8000
    python benchmarks/serve.py my.index --address http://127.0.0.1:8000 --clients 16 --seconds 20

The bare throughput is that of decoding, the model and the search on batches of the same images in this process, without a server. Both
share the processor if they run at the same time, so it is measured before the load.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import time
from pathlib import Path

import numpy as np

from unimetric.deploy.gallery import decode_upload
from unimetric.deploy.index import Index


def bare(index: Index, files: list[bytes], batch: int, seconds: float) -> float:
    """Return images per second of decode, model and search, without a server."""
    index.embed([decode_upload(files[0], "", 10**8)])
    count, begun = 0, time.perf_counter()
    while time.perf_counter() - begun < seconds:
        images = [decode_upload(files[(count + each) % len(files)], "", 10**8) for each in range(batch)]
        index.hits(*index.search_vectors(index.embed(images), 10))
        count += batch
    return count / (time.perf_counter() - begun)


async def load(address: str, files: list[bytes], clients: int, seconds: float) -> tuple[list[float], dict[int, int]]:
    """Return the latencies of all requests, and the number of each status."""
    import httpx

    times: list[float] = []
    statuses: dict[int, int] = {}
    end = time.perf_counter() + seconds
    limits = httpx.Limits(max_connections=clients)
    async with httpx.AsyncClient(base_url=address, limits=limits, timeout=60) as client:

        async def work(number: int) -> None:
            each = number
            while time.perf_counter() < end:
                begun = time.perf_counter()
                answer = await client.post("/search", files={"file": files[each % len(files)]})
                times.append(time.perf_counter() - begun)
                statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
                each += clients

        await asyncio.gather(*(work(number) for number in range(clients)))
    return times, statuses


def memory(address: str) -> float:
    """Return the memory of the server in MiB, if psutil finds its process by the port."""
    import psutil

    port = int(address.rsplit(":", 1)[1])
    for process in psutil.process_iter():
        try:
            if any(each.laddr.port == port and each.status == "LISTEN" for each in process.net_connections("tcp")):
                return process.memory_info().rss / 2**20
        except psutil.Error:
            continue
    return float("nan")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("index")
    parser.add_argument("--address", default="http://127.0.0.1:8000")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=20)
    arguments = parser.parse_args()
    address = re.sub(r"/$", "", arguments.address)
    with Index.open(arguments.index) as index:
        ids = next(iter(index.store.scan()))[0][:64]
        files = [Path(index.image_path(id_)).read_bytes() for id_ in ids]
        alone = bare(index, files, arguments.clients, arguments.seconds)
    print(f"bare: {alone:.1f} images/s in batches of {arguments.clients}")
    for clients in (1, arguments.clients):
        before = memory(address)
        times, statuses = asyncio.run(load(address, files, clients, arguments.seconds))
        middle, late = (1000 * float(np.quantile(times, part)) for part in (0.5, 0.99))
        rate = len(times) / arguments.seconds
        print(
            f"{clients} clients: {rate:.1f} images/s ({rate / alone:.2f} of bare), p50 {middle:.0f} ms, p99 {late:.0f} ms, "
            f"statuses {statuses}, memory {before:.0f} -> {memory(address):.0f} MiB",
            flush=True,
        )


if __name__ == "__main__":
    main()
