"""Object stores by URL, gs:// and s3://, opened by fsspec with the credentials of the environment."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from input_pipeline.errors import InputError, MissingLibraryError, first_line
from input_pipeline.optional import require

if TYPE_CHECKING:
    import fsspec

LIBRARIES = {"gs": "gcsfs", "s3": "s3fs"}  # fsspec's, by scheme
AZURE = ("az", "abfs", "abfss")
# Of the request that asks whether a bucket can be read. Later ones are repeated for longer.
PROBE_SECONDS = 10
PROBE = {"retries": {"mode": "standard", "total_max_attempts": 2}}


def prepare(url: str) -> str:
    """Return the scheme of a URL, "gs" or "s3", whose library then caches no listings: other processes write, too.

    Raises:
      InputError: the URL is of another store.
      MissingLibraryError: the store's library is not installed.
    """
    scheme = url.partition("://")[0]
    if scheme in AZURE:
        raise InputError(
            f"{url}: Azure is not supported, because TensorStore, which writes checkpoints, has no driver for it; "
            "mount the container, such as with blobfuse2, or use gs:// or s3://"
        )
    if scheme not in LIBRARIES:
        raise InputError(f"{url}: expected a folder, or a URL that begins with gs:// or s3://")
    try:
        require(LIBRARIES[scheme])
    except MissingLibraryError as e:
        raise MissingLibraryError(f"{url}: {e}") from None
    import fsspec

    for name in (scheme, "gcs") if scheme == "gs" else (scheme,):
        fsspec.config.conf.setdefault(name, {}).setdefault("use_listings_cache", False)
    return scheme


def filesystem(url: str) -> fsspec.AbstractFileSystem:
    """Return fsspec's file system of a URL. Raises as `prepare` does."""
    scheme = prepare(url)
    import fsspec

    return fsspec.filesystem(scheme)


@functools.lru_cache
def check_readable(url: str) -> None:
    """Raise InputError, after `PROBE_SECONDS` or little more, if the folder of a URL cannot be listed.

    An empty or missing folder of an existing bucket can be listed. Without this check, the first use of an endpoint
    that does not answer would be repeated for minutes.
    """
    scheme = prepare(url)
    bucket, _, key = url.partition("://")[2].partition("/")
    if not bucket:
        raise InputError(f"{url}: expected the name of a bucket after {scheme}://")
    folder = f"{key.rstrip('/')}/" if key else ""
    try:
        if scheme == "s3":
            probe = require("s3fs").S3FileSystem(config_kwargs=PROBE, skip_instance_cache=True)
            probe.call_s3("list_objects_v2", Bucket=bucket, Prefix=folder, MaxKeys=1, timeout=PROBE_SECONDS)
        else:
            filesystem(url).call("GET", "b/{}/o", bucket, prefix=folder, maxResults=1, timeout=PROBE_SECONDS)
    except TimeoutError:
        raise InputError(f"cannot read {url}: no answer within {PROBE_SECONDS} s") from None
    except Exception as e:  # its cause is botocore's, whose text has an error code, or there is none
        missing = isinstance(e, FileNotFoundError) and not e.__cause__  # gcsfs's text is the path of its request
        reason = "there is no such bucket" if missing else first_line(e.__cause__ or e)
        raise InputError(f"cannot read {url}: {reason}") from None
