"""Web server with byte ranges, as a process: `range_server.py FOLDER LOG`. It prints its port.

Files below `forbidden/` are not served, those below `whole/` only whole. While the file `down` exists, every answer is 503.
"""

from __future__ import annotations

import os
import re
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

FOLDER, LOG = sys.argv[1:]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path = unquote(self.path)
        file = FOLDER + path.removeprefix("/whole").removeprefix("/forbidden")
        missing = 404 if not os.path.isfile(file) else 403 if path.startswith("/forbidden") else 0
        if os.path.exists(os.path.join(FOLDER, "down")):
            missing = 503
        if missing:
            self.answer(missing, b"")
            return
        with open(file, "rb") as stream:
            data = stream.read()
        found = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if found is None or path.startswith("/whole"):
            self.answer(200, data, os.stat(file).st_mtime_ns)
            return
        start = int(found[1])
        part = data[start : int(found[2]) + 1 if found[2] else None]
        self.answer(206 if part else 416, part, os.stat(file).st_mtime_ns, f"bytes {start}-{start + len(part) - 1}/{len(data)}")

    do_HEAD = do_GET

    def answer(self, status: int, data: bytes, tag: int = 0, span: str = "") -> None:
        # First, because a test reads the log as soon as it has the answer.
        with open(LOG, "a", encoding="utf-8") as log:
            log.write(f"{self.command} {status} {len(data)} {self.path}\n")
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        if tag:
            self.send_header("ETag", f'"{tag}"')
        if span:
            self.send_header("Content-Range", span)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_address[1], flush=True)
    server.serve_forever()
