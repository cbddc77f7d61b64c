"""Server of an index: a search page and an HTTP interface.

One thread runs the model and the search on batches of requests. Other threads decode images. If the index
changes on disk, the new version is opened next to the old one, which is closed after its last request.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import time
import urllib.parse
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import torch
from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, PlainTextResponse, Response
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from python_multipart.multipart import parse_options_header
from starlette.exceptions import HTTPException
from starlette.middleware.body_limit import RequestBodyLimitMiddleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect

from unimetric.deploy.batching import Batcher, Busy
from unimetric.deploy.feedback import Feedback
from unimetric.deploy.gallery import Gallery, TooLarge, crop_upload, decode_upload, read_header
from unimetric.deploy.guard import COOKIE, Guard, cookie_of
from unimetric.deploy.index import Index
from unimetric.errors import NotFound, Unavailable, UnimetricError
from unimetric.images.pack import count_cores
from unimetric.runs.device import share_heap

PAGE = Path(__file__).with_name("page")
MOST_HITS = 200
_ASSETS = {"search.css": "text/css", "search.js": "text/javascript", "docs.html": "text/html", "docs.js": "text/javascript"}
_log = logging.getLogger("unimetric")


@dataclass(frozen=True)
class Options:
    """Limits and access of a server.

    Args:
        token: Token that requests must have; empty for none.
        hosts: Names in the header `Host` that are allowed without a token.
        origins: Origins of other pages that may send requests (CORS).
        upload: Largest body of a request in bytes.
        pixels: Largest number of pixels of an uploaded image.
        batch: Largest number of images that the model processes together.
        wait: Longest time in seconds that a request waits for others.
        queue: Largest number of searches at a time. Further ones get status 503.
        timeout: Longest time in seconds for the body of a request, and for its answer.
        reload: Seconds between two checks for a new version of the index.
        feedback: Folder of `feedback.jsonl`. None for no votes.
        device: Device of the model: `auto`, `cpu` or `cuda`.
    """

    token: str = ""
    hosts: tuple[str, ...] = ("localhost", "127.0.0.1", "::1")
    origins: tuple[str, ...] = ()
    upload: int = 20 << 20
    pixels: int = 25_000_000
    batch: int = 32
    wait: float = 0.004
    queue: int = 64
    timeout: float = 20.0
    reload: float = 1.0
    feedback: Path | None = None
    device: str = "auto"


class Metrics:
    """Prometheus metrics of a server."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        options: dict[str, Any] = {"registry": self.registry}
        times = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
        self.requests = Counter("unimetric_requests", "Finished requests.", ("path", "status"), **options)
        self.seconds = Histogram("unimetric_request_seconds", "Time of a request.", ("path",), buckets=times, **options)
        self.batch = Histogram("unimetric_batch_size", "Images per batch of the model.", buckets=(1, 2, 4, 8, 16, 32, 64), **options)
        self.open = Gauge("unimetric_open_searches", "Searches in work.", **options)
        self.images = Gauge("unimetric_index_images", "Images in the index.", **options)
        self.reloads = Counter("unimetric_reloads", "Versions of the index that were opened after the first.", **options)
        self.votes = Counter("unimetric_votes", "Votes on results.", ("vote",), **options)

    def observe(self, scope: Any, status: int, seconds: float) -> None:
        """Count a request by the pattern of its path, so that the number of series is bounded."""
        route = scope.get("route")
        path = route.path if route else "other"
        self.requests.labels(path, status).inc()
        self.seconds.labels(path).observe(seconds)


@dataclass(frozen=True)
class Question:
    """A search: a crop for the model, or the embedding of a gallery image.

    Args:
        gallery: Version of the index that it is for.
        k: Number of images.
        where: Filter; empty for none.
        crop: Center crop of an uploaded image, or None.
        vector: Raw embedding of a gallery image, or None.
        exclude: Id of that image, which is not among its results.
    """

    gallery: Gallery
    k: int
    where: str
    crop: Any = field(default=None, repr=False)
    vector: Any = field(default=None, repr=False)
    exclude: str = ""


def answer_questions(questions: Sequence[Question]) -> list[list[Any] | Exception]:
    """Embed the crops of a batch together, and search once per version, filter and count."""
    vectors: list[Any] = [each.vector for each in questions]
    embedders = {id(each.gallery.embedder): each.gallery.embedder for each in questions if each.crop is not None}
    for key, embedder in embedders.items():
        rows = [row for row, each in enumerate(questions) if each.crop is not None and id(each.gallery.embedder) == key]
        embedded = embedder.embed(torch.stack([questions[row].crop for row in rows])).cpu().numpy()
        for row, vector in zip(rows, embedded, strict=True):
            vectors[row] = vector
    groups: dict[tuple[int, int, str], list[int]] = {}
    for row, each in enumerate(questions):
        groups.setdefault((id(each.gallery), each.k + bool(each.exclude), each.where), []).append(row)
    answers: list[list[Any] | Exception] = [[] for _ in questions]
    for (_, k, where), rows in groups.items():
        index = questions[rows[0]].gallery.index
        try:
            stacked = torch.stack([torch.as_tensor(vectors[row]) for row in rows]).numpy()
            found = index.search_hits(stacked, k, where or None)
        except UnimetricError as error:
            for row in rows:  # one by one, because an embedding that is zero must not fail other searches
                alone = [replace(questions[row], crop=None, vector=vectors[row])]
                answers[row] = error if len(rows) == 1 else answer_questions(alone)[0]
            continue
        for row, hits in zip(rows, found, strict=True):
            question = questions[row]
            answers[row] = [hit for hit in hits if hit.id != question.exclude][: question.k]
    return answers


class Server:
    """State of a server: the current gallery, the queue, the threads and the metrics.

    Args:
        path: Index folder.
        options: Limits and access.
    """

    def __init__(self, path: str | Path, options: Options) -> None:
        self.path, self.options, self.metrics = Path(path), options, Metrics()
        share_heap()
        index = Index.open(self.path, device=options.device).check_complete()
        self.gallery = Gallery(index)
        self.feedback = None if options.feedback is None else Feedback(options.feedback)
        if self.feedback is not None:
            self.feedback.check()
        self.metrics.images.set(self.gallery.count)
        self.threads = ThreadPoolExecutor(max(2, count_cores()), "images")
        self.batcher: Batcher[Question, list[Any]] = Batcher(
            answer_questions, batch=options.batch, wait=options.wait, queue=options.queue, observe=self.metrics.batch.observe
        )
        self.metrics.open.set_function(lambda: self.batcher.open)

    @contextlib.asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        """Start the queue and the check for new versions, and stop both after the last request."""
        self.batcher.start()
        watcher = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            watcher.cancel()
            await self.batcher.stop()
            self.threads.shutdown(wait=True, cancel_futures=True)
            self.gallery.retire()

    async def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run a function in a thread, with a time limit."""
        future = asyncio.get_running_loop().run_in_executor(self.threads, function, *arguments)
        return await asyncio.wait_for(future, self.options.timeout)

    async def _watch(self) -> None:
        """Open new versions of the index. If that fails, it is logged and the old one stays."""
        failed = ""
        while True:
            await asyncio.sleep(self.options.reload)
            try:
                fresh = await asyncio.get_running_loop().run_in_executor(self.threads, self._open_new)
            except Exception as error:  # such as a GPU without memory for another model; the next check may succeed
                if str(error) != failed:
                    _log.warning("the new version of the index was not opened: %s", error)
                failed = str(error)
                continue
            if fresh is not None:
                old, self.gallery, failed = self.gallery, fresh, ""
                self.metrics.images.set(fresh.count)
                self.metrics.reloads.inc()
                old.retire()

    def _open_new(self) -> Gallery | None:
        """Return the gallery of a new version, with the old model if that is the same.

        None during an update, because the store then has images of both versions.
        """
        old = self.gallery
        if old.index.version == old.version:
            return None
        index = Index.open(self.path, device=self.options.device)
        assert index.store is not None  # opens it
        if index.facts.state != "ready" or index.refresh():
            index.close()
            return None
        return Gallery(index, old.embedder if index.facts.network == old.index.facts.network else None)

    # --- search ------------------------------------------------------------------------------------------------------

    async def search(self, *, k: int, where: str, id_: str = "", read: Callable[[], bytes] | None = None) -> dict[str, Any]:
        """Return the answer to a search by the id of a gallery image, or by an uploaded image.

        Args:
            k: Number of images.
            where: Filter; empty for none.
            id_: Id of an image of the index.
            read: Function that returns the content of an uploaded file.
        """
        begun = time.perf_counter()
        with self.gallery.used() as gallery:

            def prepare() -> Question:
                gallery.index.find(where or None)  # a wrong filter costs no decoding
                if read is None:
                    return Question(gallery, k, where, vector=gallery.stored(id_), exclude=id_)
                return Question(gallery, k, where, crop=crop_upload(read(), gallery.embedder.view, self.options.pixels))

            def start() -> asyncio.Future[Question]:
                return asyncio.get_running_loop().run_in_executor(self.threads, prepare)

            hits = await asyncio.wait_for(self.batcher.answer(start), self.options.timeout)
            limit = gallery.index.thresholds
        found = [
            {"id": hit.id, "path": printable(hit.path), "score": hit.score, "known": hit.known, "columns": hit.columns}
            | {"image": f"/images/{name}", "thumbnail": f"/thumbnails/{name}"}
            for hit, name in ((each, quote(each.id)) for each in hits)
        ]
        known = None if limit is None else bool(hits and hits[0].known)
        return {
            "version": gallery.version,
            "threshold": None if limit is None else limit["threshold"],
            "known": known,
            "milliseconds": round(1000 * (time.perf_counter() - begun), 1),
            "hits": found,
        }


def printable(path: str) -> str:
    """Return a path in which bytes that are not UTF-8 are replaced, for JSON and csv."""
    return path.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def quote(id_: str) -> str:
    """Return an id as one segment of an address."""
    return urllib.parse.quote(id_, safe="", errors="surrogateescape")


# --- requests ----------------------------------------------------------------------------------------------------------

_UPLOAD = {
    "type": "object",
    "properties": {
        "file": {"type": "string", "format": "binary", "description": "Image."},
        "k": {"type": "integer", "default": 10, "minimum": 1, "maximum": MOST_HITS, "description": "Number of results."},
        "where": {"type": "string", "description": "Filter, such as label = 'boot' and price < 50."},
    },
    "required": ["file"],
}
_VOTE = {
    "type": "object",
    "properties": {
        "id": {"type": "string", "description": "Id of the result."},
        "vote": {"type": "string", "enum": ["up", "down", ""], "description": "Empty takes a vote back."},
        "query": {"type": "string", "description": "Id of the gallery image that was searched with."},
        "file": {"type": "string", "format": "binary", "description": "Image that was searched with. It is saved."},
        "score": {"type": "number", "description": "Score of the result."},
    },
    "required": ["id", "vote"],
}
_PROBLEM = {
    "type": "object",
    "properties": {
        "error": {"type": "string", "description": "Problem."},
        "hint": {"type": "string", "description": "Action that may fix it. May be empty."},
    },
    "required": ["error", "hint"],
    "additionalProperties": False,
}
#: Errors of every path. `4XX` replaces the answer 422 that FastAPI declares for its own errors.
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": text, "content": {"application/json": {"schema": _PROBLEM}}}
    for status, text in (("4XX", "The request cannot be answered."), (503, "The server is busy, or the answer took too long."))
}


def _body(schema: dict[str, Any]) -> dict[str, Any]:
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": schema}}}}


@contextlib.asynccontextmanager
async def _form(request: Request) -> AsyncIterator[tuple[dict[str, str], Any]]:
    """Yield the fields and the file of a multipart request, and remove the file afterwards."""
    kind, options = parse_options_header(request.headers.get("content-type", ""))
    if kind != b"multipart/form-data":
        raise HTTPException(415, "the body must be multipart/form-data")
    if options.get(b"charset", b"utf-8").lower() not in (b"utf-8", b"utf8"):  # others decode to text that no answer can hold
        raise HTTPException(415, "the text of the body must be UTF-8")
    async with request.form(max_files=1, max_fields=8, max_part_size=16384) as form:
        fields = {key: value for key, value in form.items() if isinstance(value, str)}
        files = [value for key, value in form.items() if key == "file" and not isinstance(value, str)]
        if any(not isinstance(value, str) and key != "file" for key, value in form.items()):
            raise HTTPException(400, "the file must be in the field `file`")
        yield fields, files[0] if files else None


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= MOST_HITS and len(text) < 9):
        raise HTTPException(400, f"`k` must be a whole number from 1 to {MOST_HITS}, got `{text[:40]}`")
    return int(text)


def _vote_of(fields: dict[str, str], server: Server, data: bytes | None) -> dict[str, Any]:
    """Return a checked vote, and save the image that was searched with."""
    assert server.feedback is not None
    if not fields.get("id"):
        raise HTTPException(400, "the field `id` must be the id of a result")
    if fields.get("vote") not in ("up", "down", ""):
        raise HTTPException(400, "`vote` must be `up`, `down` or empty")
    if (data is None) == ("query" not in fields):
        raise HTTPException(400, "a vote needs either `query`, an id, or `file`, an image")
    try:
        score = float(fields["score"]) if fields.get("score") else None
    except ValueError:
        raise HTTPException(400, "`score` must be a number") from None
    if score is not None and score - score != 0:
        score = None  # not finite
    with server.gallery.used() as gallery:
        columns = gallery.index.fetch([fields["id"]])
        match = printable(gallery.index.image_path(fields["id"]))
        if data is None:
            gallery.index.fetch([fields["query"]])
            query = printable(gallery.index.image_path(fields["query"]))
        else:
            decode_upload(data, "the upload", server.options.pixels)  # only whole images are saved
            query = server.feedback.save_image(data, read_header(data, "the upload")[0])
        label = columns["label"][0] if "label" in columns else None
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        return {
            "time": now,
            "query": query,
            "match": match,
            "vote": fields["vote"],
            "score": score,
            "label": label,
            "version": gallery.version,
        }


def create_app(path: str | Path, options: Options) -> FastAPI:
    """Return the application of an index.

    Args:
        path: Index folder.
        options: Limits and access.
    """
    server = Server(path, options)
    described: dict[str, Any] = {"title": "Unimetric search", "version": server.gallery.version, "responses": _ERRORS}
    app = FastAPI(docs_url=None, redoc_url=None, lifespan=server.lifespan, **described)
    app.state.server = server
    _add_errors(app)
    _add_search(app, server)
    _add_images(app, server)
    _add_feedback(app, server)
    _add_pages(app, server)
    if options.origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(options.origins), allow_methods=["GET", "POST"], allow_headers=["Authorization"]
        )
    app.add_middleware(RequestBodyLimitMiddleware, max_body_size=options.upload)
    app.add_middleware(
        Guard,
        token=options.token,
        hosts=options.hosts,
        origins=options.origins,
        upload=options.upload,
        timeout=options.timeout,
        observe=server.metrics.observe,
    )
    return app


def _problem(status: int, error: str, hint: str = "", **headers: str) -> JSONResponse:
    return JSONResponse({"error": error, "hint": hint}, status, headers=headers)


def _add_errors(app: FastAPI) -> None:
    """Answer every error with a sentence and a hint."""

    @app.exception_handler(UnimetricError)
    async def report_error(request: Request, error: UnimetricError) -> Response:
        status = 413 if isinstance(error, TooLarge) else 404 if isinstance(error, NotFound) else 400
        return _problem(status, error.message, error.hint)

    @app.exception_handler(Unavailable)
    @app.exception_handler(OSError)
    async def report_failure(request: Request, error: Exception) -> Response:
        _log.error("%s: %s", request.url.path, error)  # addresses and paths are not for clients
        return _problem(503, "the server cannot read or write its data", "try again later", **{"Retry-After": "5"})

    @app.exception_handler(Busy)
    async def report_busy(request: Request, error: Busy) -> Response:
        return _problem(503, "the server has as many searches as its queue holds", "try again", **{"Retry-After": "1"})

    @app.exception_handler(TimeoutError)
    async def report_timeout(request: Request, error: TimeoutError) -> Response:
        return _problem(503, "the search took too long", "try again", **{"Retry-After": "5"})

    @app.exception_handler(ClientDisconnect)
    async def report_gone(request: Request, error: ClientDisconnect) -> Response:
        return _problem(400, "the body of the request is not complete")  # the client is gone, and the server has not failed

    @app.exception_handler(HTTPException)
    async def report_http(request: Request, error: HTTPException) -> Response:
        return _problem(error.status_code, str(error.detail), "see /docs", **dict(error.headers or {}))

    @app.exception_handler(RequestValidationError)
    async def report_argument(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        return _problem(422, f"`{first['loc'][-1]}`: {first['msg'].lower()}", "see /docs")


def _add_search(app: FastAPI, server: Server) -> None:
    @app.post("/search", summary="Search with an image", openapi_extra=_body(_UPLOAD))
    async def search_upload(request: Request) -> JSONResponse:
        async with _form(request) as (fields, upload):
            k = _count(fields.get("k", "10"))
            if upload is None:
                raise HTTPException(400, "the field `file` must be an image")
            answer = await server.search(k=k, where=fields.get("where", ""), read=upload.file.read)
        return JSONResponse(answer)

    @app.get("/search", summary="Search with an image of the index")
    async def search_id(
        id: Annotated[str, Query(description="Id of the image.")],
        k: Annotated[str, Query(description="Number of results.")] = "10",
        where: Annotated[str, Query(description="Filter, such as label = 'boot' and price < 50.", max_length=4000)] = "",
    ) -> JSONResponse:
        return JSONResponse(await server.search(k=_count(k), where=where, id_=id))


def _add_images(app: FastAPI, server: Server) -> None:
    headers = {"Cache-Control": "private, max-age=600"}

    @app.get("/images/{id:path}", summary="An image of the index", response_class=Response)
    async def image(id: str) -> Response:
        with server.gallery.used() as gallery:
            data, kind = await server.run(gallery.read, id)
        return Response(data, media_type=kind, headers=headers)

    @app.get("/thumbnails/{id:path}", summary="A small JPEG file of an image of the index", response_class=Response)
    async def thumbnail(id: str) -> Response:
        with server.gallery.used() as gallery:
            data = await server.run(gallery.thumbnail, id)
        return Response(data, media_type="image/jpeg", headers=headers)

    @app.get("/map", summary="Positions of images on a map")
    async def map_of_gallery() -> JSONResponse:
        with server.gallery.used() as gallery:  # no time limit: the first call computes it
            found = await asyncio.get_running_loop().run_in_executor(server.threads, lambda: gallery.map)
        return JSONResponse(found)

    @app.get("/info", summary="Size, columns and threshold of the index")
    async def info() -> JSONResponse:
        with server.gallery.used() as gallery:
            columns, count = await server.run(lambda: (gallery.columns, len(gallery.index)))
            limit = gallery.index.thresholds
        found = {"name": server.path.name, "version": gallery.version, "images": count, "columns": columns}
        limits = {"upload": server.options.upload, "pixels": server.options.pixels}
        limit_ = None if limit is None else {"threshold": limit["threshold"], "fpr": limit["fpr"]}
        return JSONResponse(found | {"threshold": limit_, "feedback": server.feedback is not None, "limits": limits})


def _add_feedback(app: FastAPI, server: Server) -> None:
    @app.post("/feedback", summary="Vote on a result", openapi_extra=_body(_VOTE))
    async def vote(request: Request) -> JSONResponse:
        if server.feedback is None:
            raise HTTPException(404, "votes are not stored")
        async with _form(request) as (fields, upload):
            data = None if upload is None else await server.run(upload.file.read)
            found = await server.run(_vote_of, fields, server, data)
        # The vote is written even if the client goes, and is on disk before the answer.
        await asyncio.shield(asyncio.get_running_loop().run_in_executor(server.threads, server.feedback.append, found))
        server.metrics.votes.labels(found["vote"] or "none").inc()
        return JSONResponse({"stored": True})

    @app.get("/feedback.csv", summary="All votes as csv", response_class=PlainTextResponse)
    async def votes() -> Response:
        if server.feedback is None:
            raise HTTPException(404, "votes are not stored")
        text = await server.run(server.feedback.as_csv)
        return Response(text, media_type="text/csv", headers={"Content-Disposition": 'attachment; filename="feedback.csv"'})


def _add_pages(app: FastAPI, server: Server) -> None:
    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return FileResponse(PAGE / "search.html", media_type="text/html", headers={"Cache-Control": "no-cache"})

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return FileResponse(PAGE / "docs.html", media_type="text/html")

    @app.get("/page/{name}", include_in_schema=False)
    async def asset(name: str) -> Response:
        if name not in _ASSETS:
            raise HTTPException(404, "no such file")
        return FileResponse(PAGE / name, media_type=_ASSETS[name], headers={"Cache-Control": "no-cache"})

    @app.get("/favicon.ico", include_in_schema=False)
    async def icon() -> Response:
        return Response(status_code=204)

    @app.post("/token", summary="Exchange the token for a cookie", include_in_schema=bool(server.options.token))
    async def sign_in(request: Request) -> Response:
        async with _form(request) as (fields, _):
            given = fields.get("token", "")
        if server.options.token and not hmac.compare_digest(given.encode(), server.options.token.encode()):
            await asyncio.sleep(0.5)  # slows down guessing
            raise HTTPException(401, "the token is wrong")
        response = JSONResponse({"signed_in": True})
        response.set_cookie(COOKIE, cookie_of(server.options.token), httponly=True, samesite="strict", max_age=30 * 86400)
        return response

    @app.get("/healthz", summary="Whether the server answers")
    async def health() -> JSONResponse:
        return JSONResponse({"status": "ok"})

    @app.get("/metrics", summary="Metrics in the format of Prometheus", response_class=PlainTextResponse)
    async def metrics() -> Response:
        return Response(generate_latest(server.metrics.registry), media_type="text/plain; version=0.0.4")
