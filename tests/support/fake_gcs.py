"""Fake of Google Cloud Storage: the part of its JSON API that TensorStore and gcsfs use for one bucket.

The objects are kept in memory. Preconditions are ignored: one client writes.
"""

import contextlib
import datetime
import itertools
import json
import re
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

BUCKET = "bucket"
ROUTE = re.compile(r"(?:/upload|/download)?/storage/v1/b/(?P<bucket>[^/]+)(?:/o(?:/(?P<name>[^/]+))?)?")
Answer = tuple[int, dict[str, str], Any]  # status, headers, and bytes or an object to encode as JSON


def environment(url: str) -> dict[str, str]:
    """Return the environment in which clients use this server, without credentials."""
    return {
        "TENSORSTORE_GCS_HTTP_URL": url,
        "GOOGLE_AUTH_TOKEN_FOR_TESTING": "none",  # TensorStore's credentials
        "STORAGE_EMULATOR_HOST": url,  # for gcsfs
        "FSSPEC_GCS_TOKEN": "anon",  # gcsfs's credentials
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # it would query the type of the bucket by gRPC with TLS
        "EPATH_USE_TF": "false",  # etils would use TensorFlow, whose address cannot be changed
        "NO_GCE_CHECK": "true",  # clients do not check if this is a machine of Google's
    }


class Server(ThreadingHTTPServer):
    """The objects by name, and their generations; with `read_only`, requests that write are refused."""

    request_queue_size = 128  # TensorStore opens many connections at once

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.objects: dict[str, bytes] = {}
        self.changed: dict[str, tuple[int, str]] = {}  # generation and time of the last write
        self.uploads: dict[str, tuple[str, bytearray]] = {}  # in progress: name, and content so far
        self.numbers, self.lock, self.read_only = itertools.count(1), threading.RLock(), False

    def put(self, name: str, data: bytes) -> dict[str, str]:
        self.objects[name] = data
        self.changed[name] = next(self.numbers), f"{datetime.datetime.now(datetime.UTC):%FT%T.%fZ}"
        return self.about(name)

    def about(self, name: str) -> dict[str, str]:
        generation, updated = self.changed[name]
        return {
            "kind": "storage#object", "bucket": BUCKET, "name": name, "size": str(len(self.objects[name])),
            "generation": str(generation), "metageneration": "1", "updated": updated,
            "contentType": "application/octet-stream",
        }  # fmt: skip

    def list(self, query: dict[str, str]) -> dict[str, Any]:
        """Return names, and prefixes of names that end in the delimiter."""
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter")
        start, end = query.get("startOffset", ""), query.get("endOffset", "\U0010ffff")
        items, prefixes = [], set()
        for name in sorted(self.objects):
            if name.startswith(prefix) and start <= name < end:
                cut = name.find(delimiter, len(prefix)) if delimiter else -1
                if cut < 0:
                    items.append(self.about(name))
                else:
                    prefixes.add(name[: cut + 1])
        return {"kind": "storage#objects", "items": items, "prefixes": sorted(prefixes)}

    def handle_error(self, *request: Any) -> None:
        """Ignore clients that have disconnected."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(*request)


class Handler(BaseHTTPRequestHandler):
    """Answers one client."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Server

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        with self.server.lock:
            status, headers, content = self.answer(body)
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(data)

    do_POST = do_PUT = do_DELETE = do_GET  # noqa: N815 - the library's names

    def answer(self, body: bytes) -> Answer:
        """Return the answer to the request."""
        server, url = self.server, urlsplit(self.path)
        query, match = dict(parse_qsl(url.query)), ROUTE.fullmatch(url.path)
        if not match:
            return refused(501, f"{self.command} {url.path} is not in this fake")
        if match["bucket"] != BUCKET:
            return refused(404, "The specified bucket does not exist.")
        if self.command != "GET" and server.read_only:
            return refused(403, "refused by the test")
        if "uploadType" in query or "upload_id" in query:
            return self.upload(query, body)
        if not match["name"]:
            return 200, {}, server.list(query)
        name = unquote(match["name"])
        if name not in server.objects:
            return refused(404, f"No such object: {BUCKET}/{name}")
        if self.command == "DELETE":
            del server.objects[name]
            return 204, {}, b""
        return self.read(name) if query.get("alt") == "media" else (200, {}, server.about(name))

    def read(self, name: str) -> Answer:
        """Return an object, or the range of its bytes that the headers request."""
        data, headers = self.server.objects[name], {"x-goog-generation": self.server.about(name)["generation"]}
        if not (wanted := re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))):
            return 200, headers, data
        first = int(wanted[1]) if wanted[1] else max(0, len(data) - int(wanted[2]))
        last = min(len(data) - 1, int(wanted[2])) if wanted[1] and wanted[2] else len(data) - 1
        if first > last:
            return refused(416, "The requested range is not satisfiable")
        return 206, headers | {"Content-Range": f"bytes {first}-{last}/{len(data)}"}, data[first : last + 1]

    def upload(self, query: dict[str, str], body: bytes) -> Answer:
        """Store an object that is sent in one request, with or without metadata, or in several (resumable)."""
        server = self.server
        if number := query.get("upload_id"):
            name, data = server.uploads[number]
            data += body
            if self.headers.get("Content-Range", "").endswith("/*"):  # more will come
                return 308, {"Range": f"bytes=0-{len(data) - 1}"}, b""
            return 200, {}, server.put(name, bytes(data))
        if query["uploadType"] == "multipart":
            boundary = re.escape(re.findall('boundary="?([^";]+)', self.headers["Content-Type"])[0].encode())
            parts = re.split(rb"(?:\r?\n)?--" + boundary + rb"(?:--|\r?\n)", body)[1:3]
            said, body = (re.split(rb"\r?\n\r?\n", part, maxsplit=1)[1] for part in parts)
            query = json.loads(said) | query
        if query["uploadType"] != "resumable":
            return 200, {}, server.put(query["name"], body)
        number = str(next(server.numbers))
        server.uploads[number] = query["name"], bytearray()
        place = f"http://{self.headers['Host']}/upload/storage/v1/b/{BUCKET}/o?upload_id={number}"
        return 200, {"Location": place}, {}

    def log_message(self, *_: Any) -> None:
        """Log nothing."""


def refused(status: int, message: str) -> Answer:
    return status, {}, {"error": {"code": status, "message": message}}


@contextlib.contextmanager
def serve() -> Iterator[Server]:
    """Serve a bucket with the name `BUCKET`."""
    with Server() as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        try:
            yield server
        finally:
            server.shutdown()
