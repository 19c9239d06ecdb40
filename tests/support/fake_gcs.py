"""Fake of Google Cloud Storage: the part of its JSON API that TensorStore, gcsfs and Google's own client use.

    with fake_gcs.serve() as (url, store):
        subprocess.run([...], env=os.environ | fake_gcs.environment(url))
        assert store.names("gs://bucket/run") == [...]

Most clients read the address and the credentials from the environment once, so they run in a process of their own. The
objects are kept in memory. There are no folders, as in the real store.
"""

import contextlib
import datetime
import itertools
import json
import re
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

PAGE = 10  # entries per answer to a list request, few enough that clients must request several
ROUTE = re.compile(
    r"(?:/upload|/download)?/storage/v1/b(?:/(?P<bucket>[^/]+)"
    r"(?P<inside>/o(?:/(?P<name>[^/]+)(?:/(?P<verb>rewriteTo|copyTo|moveTo)(?:/b/(?P<into>[^/]+))?/o/(?P<to>[^/]+))?)?)?)?"
)
Query = dict[str, str]
Answer = tuple[int, dict[str, str], Any]  # status, headers, and bytes or an object to encode as JSON


def environment(url: str) -> dict[str, str]:
    """Return the environment in which clients use this server, without credentials."""
    return {
        "TENSORSTORE_GCS_HTTP_URL": url,
        "GOOGLE_AUTH_TOKEN_FOR_TESTING": "none",  # TensorStore's credentials
        "STORAGE_EMULATOR_HOST": url,  # for gcsfs and google-cloud-storage
        "FSSPEC_GCS_TOKEN": "anon",  # gcsfs's credentials
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # it would query the type of the bucket by gRPC with TLS
        "EPATH_USE_TF": "false",  # etils would use TensorFlow, whose address cannot be changed
        "NO_GCE_CHECK": "true",  # clients do not check if this is a machine of Google's
    }


class RefusedError(Exception):
    """An answer with an error status."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


class Store:
    """The objects by address, such as gs://bucket/name. Tests may change them; their generations stay."""

    def __init__(self, *buckets: str):
        self.buckets = buckets
        self.objects: dict[str, bytes] = {}
        self.generations: dict[str, int] = {}
        self.changed: dict[str, str] = {}  # time of the last request that wrote the object
        self.uploads: dict[str, tuple[str, Query, bytearray]] = {}  # in progress: address, query, content so far
        self.requests: list[tuple[str, str]] = []  # all, in order: method, path with query
        self.refuse: Callable[[str, str], int | None] | None = None  # returns the status with which a request fails
        self.lock, self.numbers = threading.RLock(), itertools.count(1)

    def names(self, folder: str) -> list[str]:
        """Return the names of the objects under an address, relative to it, sorted."""
        with self.lock:
            return sorted(a.removeprefix(f"{folder}/") for a in self.objects if a.startswith(f"{folder}/"))

    def put(self, address: str, query: Query, data: bytes) -> dict[str, Any]:
        self.check(address, query)
        self.objects[address], self.generations[address] = data, next(self.numbers)
        self.changed[address] = f"{datetime.datetime.now(datetime.UTC):%FT%T.%fZ}"
        return self.about(address)

    def about(self, address: str) -> dict[str, Any]:
        bucket, name = address.removeprefix("gs://").split("/", 1)
        known = {"kind": "storage#object", "bucket": bucket, "name": name, "size": str(len(self.objects[address]))}
        known |= {"generation": self.generation(address), "metageneration": "1"}
        known |= {"updated": self.changed.get(address, "2000-01-01T00:00:00.000Z")}
        return known | {"contentType": "application/octet-stream"}

    def generation(self, address: str) -> str:
        """Return the generation of an object, a number that changes with its content."""
        if address not in self.generations:  # written by a test
            self.generations[address] = next(self.numbers)
        return str(self.generations[address])

    def check(self, address: str, query: Query, unchanged: int = 412) -> None:
        """Raise RefusedError if a precondition does not hold. An object that does not exist has generation 0."""
        generation = int(self.generation(address)) if address in self.objects else 0
        if int(query.get("ifGenerationMatch", generation)) != generation:
            raise RefusedError(412, f"{address} has another generation")
        if int(query.get("ifGenerationNotMatch", -1)) == generation:
            raise RefusedError(unchanged, f"{address} has this generation")

    def list(self, bucket: str, query: Query) -> dict[str, Any]:
        """Return a page of names, and of prefixes of names that end in the delimiter."""
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter")
        start, end = query.get("startOffset", ""), query.get("endOffset", "\U0010ffff")
        entries = {}  # True for a prefix
        for name in self.names(f"gs://{bucket}"):
            if name.startswith(prefix) and start <= name < end:
                cut = name.find(delimiter, len(prefix)) if delimiter else -1
                entries[name if cut < 0 else name[: cut + 1]] = cut >= 0
        left = sorted(entry for entry in entries if entry > query.get("pageToken", ""))
        page = left[: min(PAGE, int(query.get("maxResults", PAGE)))]
        items = [self.about(f"gs://{bucket}/{entry}") for entry in page if not entries[entry]]
        more = {"nextPageToken": page[-1]} if len(left) > len(page) else {}
        return {"kind": "storage#objects", "items": items, "prefixes": [e for e in page if entries[e]], **more}


class Handler(BaseHTTPRequestHandler):
    """Answers one client."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    store: Store

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.store.requests.append((self.command, self.path))
        try:
            if self.store.refuse and (status := self.store.refuse(self.command, self.path)):
                raise RefusedError(status, "refused by the test")
            with self.store.lock:
                status, headers, content = self.answer(body)
        except RefusedError as e:
            status, headers, content = e.status, {}, {"error": {"code": e.status, "message": str(e)}}
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        data = b"" if status in (204, 304) else data  # these have none
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(data)

    do_POST = do_PUT = do_DELETE = do_GET  # noqa: N815 - the library's names

    def answer(self, body: bytes) -> Answer:
        """Return the answer to the request. Raise RefusedError for any other status than success."""
        store, url = self.store, urlsplit(self.path)
        query = dict(parse_qsl(url.query))
        if not (match := ROUTE.fullmatch(url.path)):
            raise RefusedError(501, f"{self.command} {url.path} is not in this fake")
        bucket, name = unquote(match["bucket"] or ""), unquote(match["name"] or "")
        if not bucket and self.command == "POST":
            raise RefusedError(403, "does not have storage.buckets.create access to the project")
        if bucket not in store.buckets:
            raise RefusedError(404, "The specified bucket does not exist.")
        address = f"gs://{bucket}/{name}"
        if not match["inside"]:
            return 200, {}, {"kind": "storage#bucket", "id": bucket, "name": bucket}
        if "uploadType" in query or "upload_id" in query:
            return self.upload(bucket, query, body)
        if not name:
            return 200, {}, store.list(bucket, query)
        if address not in store.objects or query.get("generation", "0") not in ("0", store.generation(address)):
            raise RefusedError(404, f"No such object: {bucket}/{name}")
        if match["verb"]:
            into = f"gs://{unquote(match['into'] or bucket)}/{unquote(match['to'])}"
            done = store.put(into, query, store.objects[address])
            if match["verb"] == "moveTo":
                del store.objects[address]
            return 200, {}, {"done": True, "resource": done} if match["verb"] == "rewriteTo" else done
        store.check(address, query, 304 if self.command == "GET" else 412)
        if self.command == "DELETE":
            del store.objects[address]
            return 204, {}, b""
        return self.read(address) if query.get("alt") == "media" else (200, {}, store.about(address))

    def read(self, address: str) -> Answer:
        """Return an object, or the range of its bytes that the headers request."""
        data, headers = self.store.objects[address], {"x-goog-generation": self.store.about(address)["generation"]}
        if not (wanted := re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))):
            return 200, headers, data
        first = int(wanted[1]) if wanted[1] else max(0, len(data) - int(wanted[2]))
        last = min(len(data) - 1, int(wanted[2])) if wanted[1] and wanted[2] else len(data) - 1
        if first > last:
            raise RefusedError(416, "The requested range is not satisfiable")
        return 206, headers | {"Content-Range": f"bytes {first}-{last}/{len(data)}"}, data[first : last + 1]

    def upload(self, bucket: str, query: Query, body: bytes) -> Answer:
        """Store an object that is sent in one request, with or without metadata, or in several (resumable)."""
        store = self.store
        if number := query.get("upload_id"):
            address, begun, data = store.uploads[number]
            data += body
            if self.headers.get("Content-Range", "").endswith("/*"):  # more will come
                return 308, {"Range": f"bytes=0-{len(data) - 1}"}, b""
            return 200, {}, store.put(address, begun, bytes(data))
        if query["uploadType"] == "multipart":
            boundary = re.escape(re.findall('boundary="?([^";]+)', self.headers["Content-Type"])[0].encode())
            parts = re.split(rb"(?:\r?\n)?--" + boundary + rb"(?:--|\r?\n)", body)[1:3]
            said, body = (re.split(rb"\r?\n\r?\n", part, maxsplit=1)[1] for part in parts)
            query = json.loads(said) | query
        address = f"gs://{bucket}/{query['name']}"
        if query["uploadType"] != "resumable":
            return 200, {}, store.put(address, query, body)
        number = str(next(store.numbers))
        store.uploads[number] = address, query, bytearray()
        return 200, {"Location": f"http://{self.headers['Host']}/upload/storage/v1/b/{bucket}/o?upload_id={number}"}, {}

    def log_message(self, *_: Any) -> None:
        """Log nothing."""


class Server(ThreadingHTTPServer):
    request_queue_size = 128  # TensorStore opens many connections at once

    def handle_error(self, *request: Any) -> None:
        """Ignore clients that have disconnected."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(*request)


@contextlib.contextmanager
def serve(*buckets: str) -> Iterator[tuple[str, Store]]:
    """Serve buckets, by default one with the name "bucket"; yield the server's address and the store."""
    store = Store(*(buckets or ["bucket"]))
    with Server(("127.0.0.1", 0), type("StoreHandler", (Handler,), {"store": store})) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", store
        finally:
            server.shutdown()
