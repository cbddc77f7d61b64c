"""The server of an index: answers, limits, access, votes, new versions and shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import csv
import errno
import functools
import io
import json
import os
import random
import re
import shutil
import signal
import socket
import stat
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
from PIL import Image
from typer.testing import CliRunner

httpx = pytest.importorskip("httpx", reason="pip install 'unimetric[dev]'")
pytest.importorskip("fastapi", reason="pip install 'unimetric[serve]'")

from unimetric import Index  # noqa: E402
from unimetric.cli import app  # noqa: E402
from unimetric.deploy import building, server  # noqa: E402
from unimetric.deploy.batching import Batcher, Busy  # noqa: E402
from unimetric.deploy.facts import Facts  # noqa: E402
from unimetric.deploy.feedback import Feedback  # noqa: E402
from unimetric.deploy.gallery import decode_upload  # noqa: E402
from unimetric.errors import UnimetricError  # noqa: E402

UPLOADS = int(os.environ.get("UNIMETRIC_UPLOADS", "60"))
REQUESTS = int(os.environ.get("UNIMETRIC_REQUESTS", "60"))
KILLS = int(os.environ.get("UNIMETRIC_KILLS", "1"))
ID = "images/class 1/a&b #3.png"


def image(index: Path, id_: str = ID) -> bytes:
    with Index.open(index, device="cpu") as opened:
        return Path(opened.image_path(id_)).read_bytes()


def path_of(id_: str) -> str:
    return "/" + "/".join(("images", httpx.URL("http://x", params={"a": id_}).query.decode()[2:].replace("+", "%20")))


def test_search_answers_uploads_and_ids(index: Path, live: Callable[..., str]) -> None:
    (index / "thresholds.json").write_text(json.dumps({"threshold": 0.9999, "fpr": 0.01}))
    data = image(index)
    with httpx.Client(base_url=live(index), timeout=60) as client:
        answer = client.post("/search", files={"file": data}, data={"k": "32"}).json()
        first = answer["hits"][0]
        assert first["id"] == ID and first["score"] == pytest.approx(1, abs=1e-5) and first["known"] is True and answer["known"] is True
        assert Path(first["path"]).read_bytes() == data
        assert first["columns"] == {"label": "green", "price": 13, "new": False}
        assert len(answer["hits"]) == 32 and answer["hits"][-1]["known"] is False and answer["threshold"] == 0.9999
        assert client.get(first["image"]).content == data
        small = client.get(first["thumbnail"])
        assert small.headers["content-type"] == "image/jpeg" and Image.open(io.BytesIO(small.content)).size == (64, 48)

        near = client.get("/search", params={"id": ID, "k": "4"}).json()["hits"]
        assert ID not in [hit["id"] for hit in near]  # the image itself is left out
        assert [hit["score"] for hit in near] == pytest.approx([hit["score"] for hit in answer["hits"][1:5]], abs=1e-5)
        chosen = client.get("/search", params={"id": ID, "k": "50", "where": "label = 'o''range' and price >= 4"}).json()["hits"]
        assert sorted(hit["columns"]["price"] for hit in chosen) == [4, 5, 6, 7]

        info = client.get("/info").json()
        assert info["images"] == 32 and {each["name"]: each.get("high") for each in info["columns"]} == {
            "label": None,
            "price": 37,
            "new": None,
        }
        assert len(client.get("/map").json()["ids"]) == 32
        assert "/search" in client.get("/openapi.json").json()["paths"]
        assert client.get("/healthz").json() == {"status": "ok"}
        text = client.get("/metrics").text
        assert 'unimetric_requests_total{path="/search",status="200"} 3.0' in text and "unimetric_index_images 32.0" in text


def test_openapi_declares_the_form_of_errors(index: Path, live: Callable[..., str]) -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="pip install 'unimetric[dev]'")
    with httpx.Client(base_url=live(index, queue=0), timeout=60) as client:
        described = client.get("/openapi.json").json()
        assert "ValidationError" not in json.dumps(described)
        failures = {
            ("get", "/search"): {client.get("/search"): 422, client.get("/search", params={"id": ID, "k": "no"}): 400},
            ("post", "/search"): {client.post("/search"): 415, client.post("/search", files={"file": image(index)}): 503},
            ("get", "/images/{id}"): {client.get("/images/none"): 404, client.get("/images/none", headers={"Host": "other"}): 403},
            ("post", "/feedback"): {client.post("/feedback"): 404},
        }
    for (method, path), answers in failures.items():
        declared = described["paths"][path][method]["responses"]
        assert list(declared) == ["200", "4XX", "503"]
        for answer, status in answers.items():
            schema = declared["503" if status == 503 else "4XX"]["content"]["application/json"]["schema"]
            assert answer.status_code == status and answer.headers["content-type"] == "application/json"
            jsonschema.validate(answer.json(), schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"detail": []}, schema)


def test_equal_answers_alone_and_in_batches(index: Path, live: Callable[..., str]) -> None:
    with Index.open(index, device="cpu") as opened:
        files = [Path(opened.image_path(each)).read_bytes() for ids, *_ in opened.store.scan() for each in ids]
    address = live(index, wait=0.05)

    def ask(data: bytes) -> dict[str, float]:
        return {
            hit["id"]: round(hit["score"], 4)
            for hit in httpx.post(f"{address}/search", files={"file": data}, data={"k": "32"}, timeout=60).json()["hits"]
        }

    alone = [ask(data) for data in files[:6]]
    with ThreadPoolExecutor(16) as threads:
        together = list(threads.map(ask, files))
    for one, other in zip(alone, together, strict=False):  # sums in another order differ in the last digits
        assert one.keys() == other.keys() and all(other[key] == pytest.approx(value, abs=1e-3) for key, value in one.items())
    sizes = httpx.get(f"{address}/metrics", timeout=60).text
    assert 'unimetric_batch_size_bucket{le="1.0"} 38.0' not in sizes  # some requests shared a batch


@functools.cache
def bomb(width: int, height: int, rows: int = 0, text: int = 0) -> bytes:
    """A PNG file of a few bytes that declares many pixels, has some rows of them, and a compressed text."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    packer = zlib.compressobj(1)
    data = b"".join(packer.compress(bytes(1 + 3 * width)) for _ in range(rows)) + packer.flush()
    pieces = [(b"IHDR", header), (b"zTXt", b"a\0\0" + zlib.compress(bytes(text))), (b"IDAT", data), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(struct.pack(">I", len(d)) + n + d + struct.pack(">I", zlib.crc32(n + d)) for n, d in pieces)


def test_rejects_what_is_no_image_or_too_large(index: Path, live: Callable[..., str]) -> None:
    with httpx.Client(base_url=live(index, upload=100_000, pixels=1_000_000), timeout=60) as client:
        cases = {
            400: [b"", b"GIF89a", image(index)[:60], bomb(1000, 10), b"<svg/>", b"%PDF-1.4"],
            413: [bomb(2000, 2000), bomb(60000, 60000), b"x" * 200_000],
        }
        for status, files in cases.items():
            for data in files:
                answer = client.post("/search", files={"file": data})
                assert answer.status_code == status and answer.json().keys() == {"error", "hint"}, (data[:20], answer.text)
        boundary = b"--b\r\nContent-Disposition: form-data; name=file; filename=a\r\n\r\n"
        chunks = (piece for piece in [boundary, *[b"x" * 10_000] * 30, b"\r\n--b--\r\n"])  # sent without a length
        assert client.post("/search", content=chunks, headers={"Content-Type": "multipart/form-data; boundary=b"}).status_code == 413
        assert client.post("/search", content=b"{}").status_code == 415
        field = b"--b\r\nContent-Disposition: form-data; name=where\r\n\r\n\\ud800\r\n--b--\r\n"
        for charset, status in (("unicode_escape", 415), ("punycode", 415), ("UTF-8", 400)):
            kind = f"multipart/form-data; boundary=b; charset={charset}"
            assert client.post("/search", content=field, headers={"Content-Type": kind}).status_code == status
        for fields in ({"k": "0"}, {"k": "1e3"}, {"k": "999999999999999999999"}, {"where": "1; drop table x"}, {"where": "nope = 1"}):
            answer = client.post("/search", files={"file": image(index)}, data=fields)
            assert answer.status_code == 400 and answer.json()["error"], fields
        assert client.post("/search", files={"other": image(index)}).status_code == 400
        for name in ("../index.toml", "/etc/passwd", "%2Fetc%2Fpasswd", "..%2f..%2fetc%2fpasswd", "nope", "", "a%00b"):
            for kind in ("images", "thumbnails"):
                assert client.get(f"/{kind}/{name}").status_code in (400, 404), name
        assert client.get("/search", params={"id": "/etc/passwd"}).status_code == 404
        answer = client.get("/search", params={"url": "http://127.0.0.1/"})  # nothing is fetched from elsewhere
        assert answer.status_code == 422 and answer.json() == {"error": "`id`: field required", "hint": "see /docs"}


def test_hosts_origins_and_headers(index: Path, live: Callable[..., str]) -> None:
    with httpx.Client(base_url=live(index), timeout=60) as client:
        assert client.get("/info", headers={"Host": "evil.example"}).status_code == 403
        assert client.get("/info", headers={"Origin": "http://evil.example"}).status_code == 403
        answer = client.get("/")
        assert "script-src 'self'" in answer.headers["content-security-policy"] and "access-control-allow-origin" not in answer.headers
        assert answer.headers["x-content-type-options"] == "nosniff"
    with httpx.Client(base_url=live(index, origins=("https://shop.example",)), timeout=60) as client:
        answer = client.get("/info", headers={"Origin": "https://shop.example"})
        assert answer.headers["access-control-allow-origin"] == "https://shop.example"


def test_head_answers_as_get_does_without_a_body(index: Path, live: Callable[..., str]) -> None:
    with httpx.Client(base_url=live(index), timeout=60) as client:
        for path in ("/", "/healthz", "/page/search.css", path_of(ID), "/images/none"):
            head, full = client.head(path), client.get(path)
            assert head.status_code == full.status_code and head.content == b""
            assert head.headers["content-length"] == full.headers["content-length"]
        assert client.head("/feedback").status_code == client.get("/feedback").status_code == 405


def test_pages_of_allowed_origins_can_read_rejections(index: Path, live: Callable[..., str]) -> None:
    shop, evil = {"Origin": "https://shop.example"}, {"Origin": "https://evil.example"}
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    options = {"token": "0123456789abcdef", "origins": ("https://shop.example",), "upload": 100_000}
    with httpx.Client(base_url=live(index, **options), timeout=60) as client:
        for path in ("/search", "/info", "/nothing"):  # all are answered alike
            answer = client.options(path, headers=shop | asked)
            assert answer.status_code == 200 and answer.text == "OK", path
            assert answer.headers["access-control-allow-origin"] == "https://shop.example"
            assert "Authorization" in answer.headers["access-control-allow-headers"]
        for headers in (evil | asked, {"Origin": "http://["}):
            answer = client.options("/search", headers=headers)
            assert answer.status_code == 403 and not [name for name in answer.headers if name.startswith("access-control")]
        for method, headers in (("GET", shop | asked), ("OPTIONS", shop), ("OPTIONS", asked)):  # none of them is a preflight
            assert client.request(method, "/info", headers=headers).status_code == 401
        known = shop | {"Authorization": "Bearer 0123456789abcdef"}
        assert client.get("/info", headers=known).headers.get_list("access-control-allow-origin") == ["https://shop.example"]
        answers = {401: client.get("/info", headers=shop), 413: client.post("/search", headers=known, files={"file": b"x" * 200_000})}
    with httpx.Client(base_url=live(index, origins=options["origins"]), timeout=60) as client:
        answers[403] = client.get("/info", headers=shop | {"Host": "other.example"})
    for status, answer in answers.items():
        assert answer.status_code == status and answer.json().keys() == {"error", "hint"}
        assert answer.headers["access-control-allow-origin"] == "https://shop.example" and answer.headers["vary"] == "Origin"


@pytest.mark.parametrize(
    ("origin", "fix"),
    [
        ("shop.example", "https://shop.example"),
        ("localhost:3000", "https://localhost:3000"),
        ("https://Shop.example/page", "https://shop.example"),
        ("http://shop.example:80", "http://shop.example"),
        ("*", "https://shop.example"),
    ],
)
def test_serve_rejects_origins_that_no_browser_sends(tmp_path: Path, origin: str, fix: str) -> None:
    error = CliRunner().invoke(app, ["serve", str(tmp_path), "--cors", origin]).exception  # no index, so that nothing is served
    assert isinstance(error, UnimetricError) and f"got `{origin}`" in error.message and error.hint == f"use `--cors {fix}`"


def test_token(index: Path, live: Callable[..., str]) -> None:
    token = "0123456789abcdef"
    with httpx.Client(base_url=live(index, token=token), timeout=60) as client:
        for path in ("/info", "/map", "/metrics", "/feedback.csv", "/openapi.json", path_of(ID)):
            assert client.get(path).status_code == 401, path
        assert client.get("/healthz").status_code == client.get("/").status_code == client.get("/page/search.js").status_code == 200
        assert client.get("/info", headers={"Authorization": f"Bearer {token}"}).status_code == 200
        assert client.get("/info", headers={"Authorization": "Bearer x"}).status_code == 401
        assert client.post("/token", files={"token": (None, "wrong")}).status_code == 401
        assert client.get("/info").status_code == 401
        signed = client.post("/token", files={"token": (None, token)})
        assert token not in signed.headers["set-cookie"] and "HttpOnly" in signed.headers["set-cookie"]
        assert client.get("/info").status_code == 200
        mine = client.cookies["unimetric_token"]
    with httpx.Client(base_url=client.base_url, timeout=60) as client:  # cookies of other servers at this host
        for cookies, status in ((f'a={{"b": 1}}; unimetric_token={mine}', 200), (f"unimetric_token={mine}; é[=]", 200), ("a=b", 401)):
            assert client.get("/info", headers={"Cookie": cookies.encode()}).status_code == status, cookies


def test_serve_rejects_open_addresses_without_token(index: Path, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("short")
    cases = {"--token-file": ["--host", "0.0.0.0"], "16 printable": ["--token-file", str(tmp_path / "token")]}
    for text, words in cases.items():
        result = CliRunner().invoke(app, ["serve", str(index), *words])
        assert text in str(result.exception), result.output
    assert "not an index" in str(CliRunner().invoke(app, ["serve", str(tmp_path)]).exception)


def test_full_queue_and_slow_clients(index: Path, live: Callable[..., str]) -> None:
    address = live(index, queue=1)
    data = image(index)
    started, statuses = threading.Barrier(12), []

    def ask() -> None:
        started.wait()
        answer = httpx.post(f"{address}/search", files={"file": data}, timeout=60)
        statuses.append((answer.status_code, answer.headers.get("retry-after")))

    threads = [threading.Thread(target=ask) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (200, None) in statuses and set(statuses) <= {(200, None), (503, "1")} and (503, "1") in statuses

    def drip() -> Iterator[bytes]:
        yield b"--b\r\nContent-Disposition: form-data; name=file; filename=a\r\n\r\n"
        for _ in range(40):
            time.sleep(0.2)
            yield b"x"

    address = live(index, timeout=1.0)
    begun = time.monotonic()
    try:
        status = httpx.post(f"{address}/search", content=drip(), headers={"Content-Type": "multipart/form-data; boundary=b"}).status_code
    except httpx.TransportError:
        status = 408  # the server has closed the connection
    assert status == 408 and time.monotonic() - begun < 6
    assert 'unimetric_requests_total{path="/search",status="408"} 1.0' in httpx.get(f"{address}/metrics", timeout=60).text


def test_headers_are_limited_in_time_and_size(index: Path, live: Callable[..., str]) -> None:
    address = live(index, timeout=0.5)
    host, port = httpx.URL(address).host, httpx.URL(address).port
    with socket.create_connection((host, port), timeout=20) as silent, socket.create_connection((host, port), timeout=20) as slow:
        slow.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        received = b""
        while b'{"status":"ok"}' not in received:
            received += slow.recv(4096)
        slow.sendall(b"GET /healthz HTTP/1.1\r\nX: ")  # the second header of a connection is limited as well
        assert silent.recv(1) == slow.recv(1) == b""
    with socket.create_connection((host, port), timeout=20) as large, contextlib.suppress(ConnectionError):
        for _ in range(1000):
            large.sendall(b"GET / HTTP/1.1\r\nX: ".ljust(1 << 16, b"a"))
        pytest.fail("a header of 64 MiB was accepted")
    assert httpx.get(f"{address}/healthz").status_code == 200


def test_failures_of_the_server_show_no_paths(colored: Path, index: Path, live: Callable[..., str], tmp_path: Path) -> None:
    pytest.importorskip("lancedb", reason="pip install 'unimetric[lance]'")
    images = shutil.copytree(colored / "images", tmp_path / "images")
    Index.create(colored / "run", images, tmp_path / "lance.index", store="lance", workers=0, device="cpu").close()
    name = "class 1/a&b #3.png"
    (images / name).unlink()
    with httpx.Client(base_url=live(tmp_path / "lance.index", feedback=tmp_path / "votes"), timeout=60) as client:
        for path in ("/images/", "/thumbnails/"):
            answer = client.get(path + path_of(name).removeprefix("/images/"))
            assert answer.status_code == 404 and name in answer.text and str(tmp_path) not in answer.text
        assert client.get("/search", params={"id": name, "where": "label = 'no image"}).status_code == 400
        (tmp_path / "votes").rename(tmp_path / "moved")
        fields = {"id": name, "vote": "up", "query": name}
        lost = client.post("/feedback", files={key: (None, value) for key, value in fields.items()})
        shutil.rmtree(tmp_path / "lance.index" / "store")
        for answer in (lost, client.get("/search", params={"id": name})):
            assert answer.status_code == 503 and answer.headers["retry-after"] == "5"
            assert answer.json() == {"error": "the server cannot read or write its data", "hint": "try again later"}


def test_batcher_isolates_errors_and_bounds_the_queue() -> None:
    async def main() -> None:
        gate = threading.Event()

        def work(items: list[int]) -> list[int | Exception]:
            gate.wait(10)
            return [ValueError("odd") if item % 2 else 10 * item for item in items]

        sizes: list[int] = []
        batcher: Batcher[int, int] = Batcher(work, batch=3, wait=0.05, queue=8, observe=sizes.append)
        batcher.start()

        def ready(item: int) -> Callable[[], asyncio.Future[int]]:
            async def prepare() -> int:
                await asyncio.sleep(0)
                return item

            return lambda: asyncio.ensure_future(prepare())

        tasks = [asyncio.create_task(batcher.answer(ready(item))) for item in range(8)]
        await asyncio.sleep(0.2)
        with pytest.raises(Busy):
            await batcher.answer(ready(9))
        tasks[6].cancel()
        gate.set()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert [each for each in found if isinstance(each, int)] == [0, 20, 40]
        assert sum(isinstance(each, ValueError) for each in found) == 4
        assert max(sizes) == 3 and batcher.open == 0
        await batcher.stop()

    asyncio.run(main())


def test_votes_and_csv(index: Path, live: Callable[..., str]) -> None:
    data = image(index)
    with httpx.Client(base_url=live(index, feedback=index), timeout=60) as client:
        other = "images/class 0/a&b #1.png"
        assert client.post("/feedback", files={"file": data}, data={"id": other, "vote": "down", "score": "0.5"}).json() == {"stored": True}
        for vote in ("up", ""):
            assert client.post("/feedback", files={"query": (None, ID)}, data={"id": other, "vote": vote}).status_code == 200
        assert client.post("/feedback", files={"query": (None, other)}, data={"id": ID, "vote": "up"}).status_code == 200
        votes = [json.loads(line) for line in (index / "feedback.jsonl").read_text().splitlines()]
        assert [vote["vote"] for vote in votes] == ["down", "up", "", "up"]
        assert Path(votes[0]["query"]).read_bytes() == data and Path(votes[0]["query"]).parent == index / "feedback"
        rows = list(csv.DictReader(io.StringIO(client.get("/feedback.csv").text)))
        assert [(row["vote"], row["label"]) for row in rows] == [("down", "o'range"), ("up", "green")]  # one was taken back
        wrong = [{"id": "nope", "vote": "up", "query": ID}, {"id": ID, "vote": "good", "query": ID}, {"id": ID, "vote": "up"}]
        for fields in (*wrong, {"vote": "up", "query": ID}):
            answer = client.post("/feedback", files={key: (None, value) for key, value in fields.items()})
            assert answer.status_code in (400, 404), fields
        assert client.post("/feedback", files={"file": b"no image"}, data={"id": ID, "vote": "up"}).status_code == 400
        assert len((index / "feedback.jsonl").read_text().splitlines()) == 4
    with httpx.Client(base_url=live(index), timeout=60) as client:
        assert client.get("/feedback.csv").status_code == 404


def test_votes_on_one_upload_at_a_time_are_all_stored(tmp_path: Path) -> None:
    feedback = Feedback(tmp_path)
    for number in range(5):
        data = bytes([number]) * 100_000
        with ThreadPoolExecutor(8) as pool:
            paths = set(pool.map(lambda _, data=data: feedback.save_image(data, "PNG"), range(16)))
        assert len(paths) == 1 and Path(paths.pop()).read_bytes() == data


def test_paths_that_are_not_utf8_are_printable(colored: Path, live: Callable[..., str], tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"M\xfcller")
    try:
        shutil.copytree(colored / "images", folder / "images")
    except OSError:
        pytest.skip("this file system has UTF-8 names only")
    Index.create(colored / "run", folder, tmp_path / "my.index", workers=0, device="cpu").close()
    with httpx.Client(base_url=live(tmp_path / "my.index", feedback=tmp_path), timeout=60) as client:
        hit = client.get("/search", params={"id": ID}).json()["hits"][0]
        assert hit["path"] == f"{tmp_path}/M\ufffdller/{hit['id']}" and client.get(hit["image"]).status_code == 200
        assert client.post("/feedback", files={"query": (None, ID)}, data={"id": ID, "vote": "up"}).status_code == 200
        assert "M\ufffdller" in client.get("/feedback.csv").text


def test_narrow_images_of_the_index_are_sent(colored: Path, live: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    Image.new("RGB", (900, 8), (9, 99, 200)).save(tmp_path / "images" / "banner.png")
    Index.create(colored / "run", tmp_path / "images", tmp_path / "my.index", workers=0, device="cpu").close()
    with httpx.Client(base_url=live(tmp_path / "my.index", feedback=tmp_path), timeout=60) as client:
        answer = client.get("/images/banner.png")
        assert answer.status_code == 200 and answer.content == (tmp_path / "images" / "banner.png").read_bytes()
        assert client.get("/thumbnails/banner.png").status_code == 200


def test_embedding_without_length_fails_no_other_search(index: Path) -> None:
    server = pytest.importorskip("unimetric.deploy.server")
    with Index.open(index, device="cpu") as opened:
        gallery = server.Gallery(opened)
        vectors = [opened.embed([opened.image_path(ID)])[0], np.zeros(16, np.float32)]
        first, second = server.answer_questions([server.Question(gallery, 3, "", vector=vector) for vector in vectors])
    assert len(first) == 3 and isinstance(second, UnimetricError)


def test_feedback_survives_a_partial_line(tmp_path: Path) -> None:
    feedback = Feedback(tmp_path)
    feedback.append({"query": "a", "match": "=cmd()", "vote": "up"})
    with open(feedback.file, "ab") as file:
        file.write(b'{"query": "b", "ma')  # a killed process
    feedback.append({"query": "c", "match": "d", "vote": "down"})
    assert [vote["query"] for vote in feedback] == ["a", "c"]
    assert "'=cmd()" in feedback.as_csv()


def test_votes_on_a_file_system_that_cannot_sync_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sync = os.fsync

    def fail(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fail)
    feedback = Feedback(tmp_path)
    feedback.check()
    feedback.append({"query": "a", "match": "b", "vote": "up"})
    assert len(list(feedback)) == 1


def test_vote_on_a_full_disk_is_stored_or_an_error(tmp_path: Path, small_disk: Callable[[], AbstractContextManager[None]]) -> None:
    feedback = Feedback(tmp_path)
    stored = 0
    with small_disk(), pytest.raises(OSError):
        while True:
            feedback.append({"query": f"{stored} {'x' * 90}", "match": "b", "vote": "up"})
            stored += 1
    assert len(list(feedback)) == stored


def test_new_version_is_opened_without_a_failed_request(index: Path, colored: Path, live: Callable[..., str], tmp_path: Path) -> None:
    address = live(index)
    before = httpx.get(f"{address}/info", timeout=60).json()["version"]
    statuses: list[int] = []
    stop = threading.Event()

    def ask() -> None:
        data = image(index)
        with httpx.Client(base_url=address, timeout=60) as client:
            while not stop.is_set():
                statuses.append(client.post("/search", files={"file": data}).status_code)

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    rows = (colored / "images.csv").read_text().splitlines()
    (colored / "fewer.csv").write_text("\n".join(rows[:-4]))
    with Index.open(index, device="cpu") as opened:
        opened.update(colored / "fewer.csv", workers=0)
    end = time.monotonic() + 60
    while (info := httpx.get(f"{address}/info", timeout=60).json())["version"] == before and time.monotonic() < end:
        time.sleep(0.05)
    stop.set()
    for thread in threads:
        thread.join()
    assert info["images"] == 28 and info["version"] != before
    assert set(statuses) == {200}
    assert "unimetric_reloads_total 1.0" in httpx.get(f"{address}/metrics", timeout=60).text


def test_another_index_with_the_same_path_is_served(index: Path, colored: Path, live: Callable[..., str], tmp_path: Path) -> None:
    Index.create(colored / "run", colored / "images" / "class 0", tmp_path / "other", workers=0, device="cpu").close()
    address, opened = live(index), Index.open(index, device="cpu")
    index.rename(tmp_path / "earlier")
    (tmp_path / "other").rename(index)
    assert opened.version != opened.facts.version
    end = time.monotonic() + 20
    while httpx.get(f"{address}/info", timeout=60).json()["images"] != 8:
        assert time.monotonic() < end
        time.sleep(0.05)


def test_another_index_with_the_same_weights_crops_in_its_own_way(index: Path, colored: Path, tmp_path: Path) -> None:
    other, images = tmp_path / "other", colored / "images" / "class 0"
    Index.create(colored / "run", images, other, workers=0, device="cpu", transform="base(size=32, resize=64)").close()
    opened = Index.open(index, device="cpu")
    assert opened.embedder.view.recipe.resize == 32
    index.rename(tmp_path / "earlier")
    other.rename(index)
    assert opened.refresh() and opened.embedder.view.recipe.resize == 64


def test_new_version_is_opened_after_a_failure(index: Path, live: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    address, opened, failures = live(index), server.Gallery, []

    def fail_once(*args: object) -> object:
        if not failures:
            failures.append(1)
            raise RuntimeError("CUDA out of memory")
        return opened(*args)  # type: ignore[arg-type]

    before = httpx.get(f"{address}/info", timeout=60).json()["version"]
    monkeypatch.setattr(server, "Gallery", fail_once)
    facts = Facts.read(index)
    replace(facts, generation=facts.generation + 1).write(index)
    end = time.monotonic() + 20
    while httpx.get(f"{address}/info", timeout=60).json()["version"] == before:
        assert time.monotonic() < end
        time.sleep(0.05)
    assert failures


def test_index_of_a_killed_update_is_served(
    index: Path, colored: Path, live: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*args: object) -> None:
        raise KeyboardInterrupt

    fewer = colored / "fewer.csv"
    fewer.write_text("\n".join((colored / "images.csv").read_text().splitlines()[:-4]))
    with monkeypatch.context() as patch, Index.open(index, device="cpu") as opened, pytest.raises(KeyboardInterrupt):
        patch.setattr(building.Ledger, "forget", die)
        opened.update(fewer, workers=0)
    assert Facts.read(index).state == "updating"
    address = live(index)
    info = httpx.get(f"{address}/info", timeout=60).json()
    assert info["images"] == 28
    assert len(httpx.get(f"{address}/search", params={"id": ID, "k": 50}, timeout=60).json()["hits"]) == 27
    with Index.open(index, device="cpu") as opened:
        opened.update(fewer, workers=0)
    end = time.monotonic() + 60
    while httpx.get(f"{address}/info", timeout=60).json()["version"] == info["version"]:
        assert time.monotonic() < end
        time.sleep(0.05)
    replace(Facts.read(index), state="building").write(index)
    with pytest.raises(UnimetricError, match="its build is not complete"):
        live(index)


def test_index_in_an_update_is_not_opened(index: Path, live: Callable[..., str]) -> None:
    address, facts = live(index), Facts.read(index)
    versions = []
    for state in ("updating", "ready"):
        replace(facts, generation=facts.generation + 1, state=state).write(index)
        end = time.monotonic() + (0.5 if state == "updating" else 20)
        while (version := httpx.get(f"{address}/info", timeout=60).json()["version"]) == facts.version and time.monotonic() < end:
            time.sleep(0.05)
        versions.append(version)
    assert versions[0] == facts.version != versions[1]


def start_process(index: Path, *options: str) -> tuple[subprocess.Popen[str], str]:
    words = [sys.executable, "-m", "unimetric.cli", "serve", str(index), "--port", "0", "--device", "cpu", *options]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert process.stdout is not None
    return process, process.stdout.readline().strip().rstrip("/")


def test_two_processes_serve_one_state_of_an_index_at_a_time(index: Path, colored: Path, tmp_path: Path) -> None:
    """In state n, the rows of class n % 4 are missing, and all prices are n."""
    with open(colored / "images.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    data, stop = image(index), threading.Event()
    answers: dict[str, list[tuple[int, ...]]] = {}  # number of images, and their states

    def write_state(state: int) -> None:
        with open(colored / "state.csv", "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(row | {"price": state} for number, row in enumerate(rows) if number // 8 != state % 4)

    def ask(address: str) -> None:
        while not stop.is_set():
            hits = httpx.post(f"{address}/search", files={"file": data}, data={"k": "32"}, timeout=60).raise_for_status().json()["hits"]
            answers[address].append((len(hits), *{hit["columns"]["price"] for hit in hits}))

    write_state(0)
    with ThreadPoolExecutor(2) as threads, Index.open(index, device="cpu") as opened:
        opened.update(colored / "state.csv", workers=0)
        servers = list(threads.map(lambda _: start_process(index, "--no-feedback"), range(2)))
        try:
            answers |= {address: [] for _, address in servers}
            running = [threads.submit(ask, address) for address in answers]
            for state in range(1, 7):
                write_state(state)
                opened.update(colored / "state.csv", workers=0)
                time.sleep(0.1)
            end = time.monotonic() + 20
            while not all(each and each[-1] == (24, 6) for each in answers.values()) and time.monotonic() < end:
                time.sleep(0.05)
        finally:
            stop.set()
            failures = [each.exception() for each in running]
            for process, _ in servers:
                process.terminate()
                process.wait(20)
    assert failures == [None, None]
    for each in answers.values():
        assert each == sorted((24, state) for _, state, *_ in each) and each[-1] == (24, 6)


def test_process_loses_no_vote_when_killed_and_finishes_when_stopped(index: Path) -> None:
    stored: list[str] = []

    def vote(address: str, number: int) -> None:
        for each in range(1000):
            score = f"{number}.{each:04d}1"
            fields = {"id": ID, "vote": "up", "query": ID, "score": score}
            try:
                answer = httpx.post(f"{address}/feedback", files={key: (None, value) for key, value in fields.items()}, timeout=60)
            except httpx.TransportError:
                return
            if answer.status_code == 200:
                stored.append(score)

    for turn in range(1, KILLS + 1):
        process, address = start_process(index)
        threads = [threading.Thread(target=vote, args=(address, 3 * turn + each)) for each in range(3)]
        for thread in threads:
            thread.start()
        while len(stored) < 20 * turn:
            time.sleep(0.01)
        process.kill()
        process.wait()
        for thread in threads:
            thread.join()
    found = [json.loads(line) for line in (index / "feedback.jsonl").read_text().splitlines() if line.endswith("}")]
    assert set(stored) <= {str(each["score"]) for each in found} and len(stored) >= 20 * KILLS

    process, address = start_process(index)
    body = httpx.Request("POST", address, files={"file": image(index)})
    content = body.read()

    def slowly() -> Iterator[bytes]:
        yield content[:100]
        time.sleep(0.3)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.7)
        yield content[100:]

    answer = httpx.post(f"{address}/search", content=slowly(), headers={"Content-Type": body.headers["content-type"]}, timeout=60)
    assert answer.status_code == 200 and answer.json()["hits"][0]["id"] == ID
    process.wait(60)
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{address}/healthz", timeout=60)


# --- many requests -----------------------------------------------------------------------------------------------------


def fuzzed(rng: random.Random, good: list[bytes]) -> bytes:
    """A damaged, disguised or huge upload."""
    data = bytearray(rng.choice(good))
    kind = rng.randrange(8)
    if kind == 0:
        return bytes(data[: rng.randrange(len(data))])
    if kind == 1:
        for _ in range(rng.randrange(1, 30)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        return bytes(data)
    if kind == 2:
        rows, text = rng.choice([(0, 0), (3, 0), (0, 10**7)])
        return bomb(rng.choice([1, 3000, 5000, 65535]), rng.choice([1, 4000, 5000, 65535]), rows, text)
    if kind == 3:
        return bytes(data) + b"<script>alert(1)</script>PK\x03\x04"
    if kind == 4:
        return rng.randbytes(rng.randrange(2000))
    if kind == 5:
        return rng.choice(
            [b"%!PS-Adobe-3.0 EPSF-3.0\n", b"<svg xmlns='http://www.w3.org/2000/svg'/>", b"%PDF-1.7", b"MZ", b"\x7fELF"]
        ) + bytes(data)
    if kind == 6:
        return bytes(data[: len(data) // 2]) + bytes(rng.choice(good))
    return bytes(data)


def good_uploads(index: Path) -> list[bytes]:
    """An image of the index, and one of each format."""
    found = [image(index)]
    pixels = np.random.default_rng(0).integers(0, 256, (40, 60, 3)).astype(np.uint8)
    for kind in ("JPEG", "GIF", "WEBP", "BMP", "TIFF", "PPM"):
        out = io.BytesIO()
        Image.fromarray(pixels).save(out, kind)
        found.append(out.getvalue())
    return found


def send_fuzzed(client: httpx.Client, rng: random.Random, data: bytes) -> int:
    """Send an upload with a length, in chunks without one, or with a wrong type, and return the status."""
    kind = "multipart/form-data; boundary=b"
    body = b"--b\r\nContent-Disposition: form-data; name=file; filename=a\r\n\r\n" + data + rng.choice([b"\r\n--b--\r\n", b""])
    chance = rng.random()
    if chance < 0.2:
        return client.post("/search", content=iter([body[:50], body[50:]]), headers={"Content-Type": kind}).status_code
    if chance < 0.3:
        wrong = rng.choice(["multipart/form-data", "application/json", "image/png", "multipart/form-data; boundary=" + "b" * 300])
        return client.post("/search", content=body, headers={"Content-Type": wrong}).status_code
    return client.post("/search", files={"file": (rng.choice(["a.jpg", "../../x", "\u2603.png"]), data)}).status_code


def leave(address: str) -> socket.socket:
    """Open a connection, send a part of an upload, and leave the rest out."""
    found = socket.create_connection(("127.0.0.1", int(address.rsplit(":", 1)[1])))
    head = "POST /search HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data; boundary=b\r\nContent-Length: 9999\r\n\r\n"
    found.sendall(head.encode() + b"--b\r\nContent-Disposition: form-data; name=file; filename=a\r\n\r\nxx")
    return found


def peak_memory(process: psutil.Process) -> float:
    """Return the largest memory of a process since the last call in MiB, if the system can say so, else the present one."""
    try:
        text = Path(f"/proc/{process.pid}/status").read_text()
        Path(f"/proc/{process.pid}/clear_refs").write_text("5")  # forgets the largest
        return int(re.findall(r"VmHWM:\s+(\d+)", text)[0]) / 2**10
    except (OSError, IndexError):
        return process.memory_info().rss / 2**20


def processor_time(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def test_a_large_broken_upload_keeps_no_memory() -> None:
    data, process = bomb(5000, 5000, 5000)[:-10_000], psutil.Process()
    before = process.memory_info().rss
    with pytest.raises(UnimetricError) as caught:
        decode_upload(data, "upload", 10**8)
    assert caught.value.message.startswith("upload")
    assert process.memory_info().rss - before < 40 * 2**20  # while the error is still held


@pytest.mark.timeout(300 + UPLOADS)
def test_fuzzed_uploads_never_fail_the_server(index: Path, request: pytest.FixtureRequest) -> None:
    # A server that gets little of the processor answers 503 after its time limit. Processor time is checked instead.
    process, address = start_process(index, "--timeout", "120")
    request.addfinalizer(process.kill)  # also if a check fails
    server, rng, good = psutil.Process(process.pid), random.Random(0), good_uploads(index)
    seen, slow, busiest, slowest = [], [], (0.0, 0, b""), (0.0, 0, b"")
    with httpx.Client(base_url=address, timeout=130) as client:
        for data in good:
            assert client.post("/search", files={"file": data}).status_code == 200
        waits = [client.get("/healthz").elapsed.total_seconds() for _ in range(20)]
        assert min(waits) < 0.03  # without TCP_NODELAY, all answers take at least 40 ms
        peak_memory(server)
        before = server.memory_info().rss / 2**20
        for number in range(UPLOADS):
            data = bomb(5000, 5000, 5000) if number % 500 == 7 else fuzzed(rng, good)
            slow += [leave(address)] if number % 10 == 0 else []
            if len(slow) > 20:
                slow.pop(0).close()
            begun, used = time.monotonic(), processor_time(server)
            seen.append(send_fuzzed(client, rng, data))
            slowest = max(slowest, (time.monotonic() - begun, number, data[:24]))
            busiest = max(busiest, (processor_time(server) - used, number, data[:24]))
        for each in slow:
            each.close()
        assert client.get("/healthz").status_code == 200
        text = client.get("/metrics").text
    grown = peak_memory(server) - before
    process.terminate()
    process.wait(60)
    counts = {each: seen.count(each) for each in sorted(set(seen))}
    print(f"{UPLOADS} uploads: {counts}, slowest {slowest}, most processor time {busiest}, largest memory +{grown:.0f} MiB")
    assert set(seen) <= {200, 400, 413, 415} and {200, 400, 413} <= set(seen)
    assert 'status="5' not in text
    assert busiest[0] < 2 and grown < 256


@pytest.mark.timeout(300 + REQUESTS)
def test_memory_does_not_grow_with_requests(index: Path, live: Callable[..., str]) -> None:
    out = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (1500, 2000, 3)).astype(np.uint8)).save(out, "JPEG")  # 9 MB of pixels
    good, found = good_uploads(index), []
    with httpx.Client(base_url=live(index), timeout=60) as client, ThreadPoolExecutor(4) as threads:

        def ask(number: int) -> None:
            data = out.getvalue() if number % 4 == 0 else good[number % len(good)]
            hits = client.post("/search", files={"file": data}, data={"where": f"price < {number}"}).json()["hits"]
            assert not hits or client.get(hits[0]["thumbnail"]).status_code == 200
            assert client.get("/search", params={"id": ID}).status_code == 200

        for block in range(5):
            list(threads.map(ask, range(block * REQUESTS // 5, (block + 1) * REQUESTS // 5)))
            found.append(psutil.Process().memory_info().rss / 2**20)
    print(f"memory after each of 5 blocks of {REQUESTS // 5} requests: {' '.join(f'{each:.0f}' for each in found)} MiB")
    assert found[-1] - found[1] < 48
