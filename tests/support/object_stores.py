"""Object stores for tests, each with a bucket: S3 by moto, and a fake of Google Cloud Storage."""

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import fake_gcs

from input_pipeline import stores

BUCKET = fake_gcs.BUCKET


class ObjectStore:
    """An object store that this process and new ones use: the variables of the environment name its server.

    Fields:
      bucket: the URL of its bucket.
      server: the fake server; None for S3.
    """

    def __init__(self, scheme: str, setenv: Callable[[str, str], None], server: Any):
        self.bucket, self.scheme, self.setenv, self.server = f"{scheme}://{BUCKET}", scheme, setenv, server

    def use(self, address: str) -> None:
        """Let this process and new ones use a server; its caches of connections are emptied."""
        import fsspec
        from etils.epath import backend

        variables = fake_gcs.environment(address) if self.scheme == "gs" else s3_environment(address)
        for name, value in variables.items():
            self.setenv(name, value)
        stores.check_readable.cache_clear()
        backend.fsspec_backend._get_filesystem.cache_clear()
        fsspec.get_filesystem_class(self.scheme).clear_instance_cache()

    def names(self, folder: str) -> list[str]:
        """Return the names of the objects under a URL, relative to it, sorted."""
        prefix = folder.partition("://")[2]
        return sorted(path.removeprefix(f"{prefix}/") for path in stores.filesystem(folder).find(folder))

    def read(self, url: str) -> bytes:
        """Return the content of an object."""
        return stores.filesystem(url).cat_file(url)

    def write(self, url: str, data: bytes) -> None:
        """Write an object."""
        stores.filesystem(url).pipe_file(url, data)


def s3_environment(address: str) -> dict[str, str]:
    """Return the environment in which clients use this server."""
    return {
        "AWS_ENDPOINT_URL": address, "AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_EC2_METADATA_DISABLED": "true", "AWS_CONFIG_FILE": "/dev/null", "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
    }  # fmt: skip


@contextlib.contextmanager
def serve(scheme: str, setenv: Callable[[str, str], None]) -> Iterator[ObjectStore]:
    """Serve an empty bucket of a scheme, "gs" or "s3", and let this process use it.

    Args:
      scheme: the kind of store.
      setenv: function that sets a variable of the environment.
    """
    if scheme == "gs":
        with fake_gcs.serve() as server:
            store = ObjectStore(scheme, setenv, server)
            store.use(f"http://127.0.0.1:{server.server_port}")
            yield store
    else:
        from moto.s3.models import s3_backends
        from moto.server import ThreadedMotoServer

        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
        server.start()
        try:
            s3_backends.reset()
            s3_backends["123456789012"]["aws"].create_bucket(BUCKET, "us-east-1")
            store = ObjectStore(scheme, setenv, None)
            store.use("http://{}:{}".format(*server.get_host_and_port()))
            yield store
        finally:
            server.stop()
    store.use("http://127.0.0.1:9")  # later tests do not wait for this server
