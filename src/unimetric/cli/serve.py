"""Commands for an index in use: `serve`, `audit`, `watch`."""

from __future__ import annotations

import ipaddress
import re
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from unimetric.cli.options import Device, IndexFolder
from unimetric.errors import UnimetricError


def serve(
    folder: IndexFolder,
    host: Annotated[str, typer.Option(help="Address to listen at. Others than this machine's own need `--token-file`.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 for a free one.", min=0, max=65535)] = 8000,
    token_file: Annotated[Path | None, typer.Option(help="File with the token that requests must have.", show_default=False)] = None,
    cors: Annotated[
        list[str] | None, typer.Option(help="Origin whose pages may send requests, such as https://shop.example.", show_default=False)
    ] = None,
    upload: Annotated[float, typer.Option(help="Largest upload in MiB.", min=0.001)] = 20,
    megapixels: Annotated[float, typer.Option(help="Largest uploaded image in million pixels.", min=0.0001, max=178)] = 25,
    batch: Annotated[int, typer.Option(help="Largest number of images that the model processes together.", min=1)] = 32,
    wait: Annotated[float, typer.Option(help="Longest time in milliseconds that a request waits for others.", min=0)] = 4,
    queue: Annotated[int, typer.Option(help="Searches at a time; further ones get status 503.", min=1)] = 64,
    timeout: Annotated[float, typer.Option(help="Longest time of a request in seconds.", min=0.1)] = 20,
    feedback: Annotated[Path | None, typer.Option(help="Folder of feedback.jsonl (default: the index folder).", show_default=False)] = None,
    no_feedback: Annotated[bool, typer.Option("--no-feedback", help="Store no votes.")] = False,
    device: Device = "auto",
) -> None:
    """Serve an index: a search page for browsers, and an HTTP interface.

    A new version of the index is opened without a restart.

    Examples:

    - `unimetric serve my.index`
    - `unimetric serve my.index --host 0.0.0.0 --port 80 --token-file token.txt`
    """
    token = "" if token_file is None else read_token(token_file)
    if not token and not is_loopback(host):
        raise UnimetricError(
            f"`--host {host}` is reachable from other machines and requires `--token-file`",
            "write a secret into a file: `openssl rand -hex 32 > token.txt`, and add `--token-file token.txt`",
        )
    try:
        import uvicorn

        from unimetric.deploy.server import Options, create_app
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "unimetric":
            raise
        raise UnimetricError(f"`serve` requires the package {error.name}", "pip install 'unimetric[serve]'") from None
    options = Options(
        token=token,
        hosts=("localhost", "127.0.0.1", "::1", host),
        origins=tuple(map(check_origin, cors or ())),
        upload=int(upload * 2**20),
        pixels=int(megapixels * 1e6),
        batch=batch,
        wait=wait / 1000,
        queue=queue,
        timeout=timeout,
        feedback=None if no_feedback else (feedback or folder),
        device=device,
    )
    _listen(uvicorn, create_app(folder, options), host, port, timeout)


def _listen(uvicorn: Any, app: Any, host: str, port: int, timeout: float) -> None:
    """Bind the address, print it, and answer requests until a signal arrives."""
    import contextlib
    import socket

    from unimetric.deploy.connection import configure

    shown = f"[{host}]" if ":" in host else host
    try:
        listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=1024)
    except OSError as error:
        raise UnimetricError(f"{shown}:{port}: cannot listen there: {error.strerror or error}", "use another `--port`") from None
    # Connections inherit it. Otherwise, the body of an answer waits 40 ms until the client has confirmed the header.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with listener, contextlib.suppress(KeyboardInterrupt):
        print(f"http://{shown}:{listener.getsockname()[1]}/", flush=True)
        uvicorn.Server(configure(app, timeout=timeout)).run(sockets=[listener])


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach an address.

    >>> is_loopback("localhost"), is_loopback("127.0.0.1"), is_loopback("::1"), is_loopback("0.0.0.0")
    (True, True, True, False)
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_origin(text: str) -> str:
    """Return an origin, or raise an error if no browser sends it.

    >>> check_origin("https://shop.example"), check_origin("http://localhost:3000")
    ('https://shop.example', 'http://localhost:3000')
    """
    scheme, _, rest = text.lower().rpartition("://")
    scheme, host = scheme or "https", rest.partition("/")[0]
    host = host.removesuffix({"https": ":443", "http": ":80"}.get(scheme, ""))
    valid = re.fullmatch(r"[a-z0-9._-]+(:\d+)?|\[[0-9a-f:]+\](:\d+)?", host)
    if not valid or text != f"{scheme}://{host}":
        fix = f"{scheme}://{host}" if valid else "https://shop.example"
        raise UnimetricError(f"`--cors` must be scheme and host as browsers send them, got `{text}`", f"use `--cors {fix}`")
    return text


def read_token(file: Path) -> str:
    """Return the token in a file."""
    try:
        token = file.read_text(encoding="ascii").strip()
    except OSError as error:
        hint = "write a secret into a file: `openssl rand -hex 32 > token.txt`, and use `--token-file token.txt`"
        raise UnimetricError(f"{file}: cannot be read: {error.strerror}", hint) from None
    except ValueError as error:
        raise UnimetricError(f"{file}: cannot be read: {error}", "write a token of letters and digits into it") from None
    if len(token) < 16 or not token.isprintable() or " " in token:
        raise UnimetricError(
            f"{file}: a token must have at least 16 printable characters without spaces, got {len(token)}", f"openssl rand -hex 32 > {file}"
        )
    return token


def audit(
    folder: IndexFolder,
    out: Annotated[Path, typer.Option(help="HTML file. The csv files of the audits are written next to it.")] = Path("audit.html"),
    audits: Annotated[str, typer.Option(help="Audits, separated by `;` (default: all). `unimetric list audits` explains them.")] = "",
    label: Annotated[str, typer.Option(help="Column of the classes.")] = "label",
    most: Annotated[int, typer.Option(help="Findings per audit on the page; the csv files have all.", min=1)] = 40,
) -> None:
    """Find duplicates, wrong labels, hard classes, clusters and outliers.

    Examples:

    - `unimetric audit my.index --out audit.html`
    - `unimetric audit my.index --audits "near_duplicates; suspicious_labels(neighbors=20)"`
    """
    from unimetric.config import split_specs
    from unimetric.deploy.audit import AUDITS
    from unimetric.deploy.audit import audit as run_audits
    from unimetric.runs.display import Display

    chosen = split_specs(audits, "`--audits`") or list(AUDITS)
    with Display() as display:
        found = run_audits(folder, out, audits=chosen, label=label, most=most, progress=display.step)
        for findings in found.values():
            count = len(findings.groups)
            display.line(f"{findings.title:<20} {count:>6,} {'finding' if count == 1 else 'findings'}")
        display.line(f"see {out} and {out.with_suffix('.*.csv')}")


def watch(
    folder: IndexFolder,
    queries: Annotated[
        Path, typer.Argument(help="Folder of images, such as the queries of a day, or csv file with the columns path and label.")
    ],
    level: Annotated[float, typer.Option(help="Quantile of the distance without drift that may be reached.", min=0.5, max=0.9999)] = 0.99,
    draws: Annotated[int, typer.Option(help="Draws from the gallery.", min=20)] = 200,
    fit: Annotated[
        bool, typer.Option("--fit", help="Measure recall by distance once, on changed images of the gallery, to predict the recall.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    device: Device = "auto",
) -> None:
    """Compare new queries with an index. The exit code is 3 if they have drifted.

    Examples:

    - `unimetric watch my.index today/`
    - `unimetric watch my.index today/ --fit --json`
    """
    import json

    from unimetric.deploy.watch import watch as compare
    from unimetric.runs.display import Display

    with Display() as display:
        found = compare(folder, queries, level=level, draws=draws, fit=fit, device=device, progress=partial(display.step, "embedding"))
    if as_json:
        print(json.dumps(found))
    else:
        word = "outside" if found["outside"] else "inside"
        part = f" of {found['readable']:,}" if found["readable"] > found["queries"] else ""
        print(f"{found['queries']:,}{part} queries against {found['gallery']:,} images of the gallery")
        print(f"distance {found['distance']:.4g}, without drift up to {found['limit']:.4g}: {word} (p = {found['p']:.3g})")
        if "recall" in found:
            recall = found["recall"]
            note = ", outside the range of the curve" if recall["extrapolated"] else ""
            interval = f"[{100 * recall['low']:.1f}, {100 * recall['high']:.1f}]"
            print(f"expected recall@1 {100 * recall['expected']:.1f} % {interval} of known classes{note}; new classes need labels")
        if "measured" in found:
            recall = found["measured"]
            interval = f"[{100 * recall['low']:.1f}, {100 * recall['high']:.1f}]"
            print(f"measured recall@1 {100 * recall['recall']:.1f} % {interval} of {recall['queries']:,} labeled queries")
    if found["outside"]:
        raise typer.Exit(3)
