"""Fake of S3, by moto, with the interface of `fake_gcs`: objects by address, and requests that a test can refuse.

    with fake_s3.serve() as (url, store):
        subprocess.run([...], env=os.environ | fake_s3.environment(url))
        assert store.names("s3://bucket/run") == [...]

moto compares and writes in two steps; here, one request is answered at a time, so that conditional writes are atomic as
in the real store.
"""

import contextlib
import io
import threading
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

from moto.moto_server.werkzeug_app import create_backend_app
from moto.s3.models import s3_backends
from werkzeug.serving import WSGIRequestHandler, make_server

ERROR = "<Error><Code>{code}</Code><Message>{message}</Message></Error>"
CODES = {401: "InvalidAccessKeyId", 403: "AccessDenied", 503: "SlowDown"}  # of refused requests, by status


def environment(url: str) -> dict[str, str]:
    """Return the environment in which clients use this server."""
    return {
        "AWS_ENDPOINT_URL": url, "AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_EC2_METADATA_DISABLED": "true", "AWS_CONFIG_FILE": "/dev/null", "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
    }  # fmt: skip


class Objects(MutableMapping[str, bytes]):
    """moto's objects by address, such as s3://bucket/name."""

    def __init__(self) -> None:
        self.backend = s3_backends["123456789012"]["aws"]

    def __getitem__(self, address: str) -> bytes:
        bucket, name = address.removeprefix("s3://").split("/", 1)
        return bytes(self.backend.buckets[bucket].keys[name].value)

    def __setitem__(self, address: str, data: bytes) -> None:
        self.backend.put_object(*address.removeprefix("s3://").split("/", 1), data)

    def __delitem__(self, address: str) -> None:
        bucket, name = address.removeprefix("s3://").split("/", 1)
        del self.backend.buckets[bucket].keys[name]

    def __iter__(self) -> Iterator[str]:
        return iter([f"s3://{bucket}/{name}" for bucket, b in self.backend.buckets.items() for name in b.keys])

    def __len__(self) -> int:
        return len(list(iter(self)))


class Store:
    """The objects, and the requests that a test refuses."""

    def __init__(self) -> None:
        self.objects = Objects()
        self.requests: list[tuple[str, str]] = []  # all, in order: method, path with query
        self.refuse: Callable[[str, str], int | None] | None = None  # returns the status with which a request fails
        self.lock = threading.RLock()
        self.app = create_backend_app("s3")

    def names(self, folder: str) -> list[str]:
        """Return the names of the objects under an address, relative to it, sorted."""
        return sorted(a.removeprefix(f"{folder}/") for a in self.objects if a.startswith(f"{folder}/"))

    def put(self, address: str, query: object, data: bytes) -> None:
        self.objects[address] = data

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
        """Answer a request (WSGI)."""
        environ["wsgi.input"] = io.BytesIO(environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0)))
        method, path = environ["REQUEST_METHOD"], f"{environ['PATH_INFO']}?{environ['QUERY_STRING']}"
        with self.lock:
            self.requests.append((method, path))
            if self.refuse and (status := self.refuse(method, path)):
                body = ERROR.format(code=CODES[status], message="refused by the test").encode()
                start_response(f"{status} Refused", [("Content-Length", str(len(body)))])
                return [body]
            return [b"".join(self.app(environ, start_response))]


class Handler(WSGIRequestHandler):
    """Answers one client."""

    protocol_version = "HTTP/1.1"  # keeps connections

    def log(self, *_: Any) -> None:
        """Log nothing."""


@contextlib.contextmanager
def serve(*buckets: str) -> Iterator[tuple[str, Store]]:
    """Serve buckets, by default one with the name "bucket"; yield the server's address and the store."""
    s3_backends.reset()
    store = Store()
    for bucket in buckets or ["bucket"]:
        store.objects.backend.create_bucket(bucket, "us-east-1")
    server = make_server("127.0.0.1", 0, store, threaded=True, request_handler=Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", store
    finally:
        server.shutdown()
        server.server_close()
