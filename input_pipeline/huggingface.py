"""Repositories of the Hugging Face Hub: names, commits, and downloads of single files.

A name is `hf:OWNER/NAME`, optionally with a folder of the repository and with a revision, which is a branch, a tag or a
commit: `hf:OWNER/NAME/FOLDER@REVISION`. The library huggingface_hub transfers the files; its cache, its token and its
environment variables apply: HF_HOME, HF_TOKEN, HF_HUB_OFFLINE, HF_ENDPOINT. Nothing that is downloaded is executed.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from input_pipeline.errors import InputError, first_line_with_type
from input_pipeline.optional import require

PREFIX = "hf:"
LIBRARY = "huggingface_hub"
SENDER = "dcvit"  # the name that requests carry
ID = r"\w[\w.-]*/\w[\w.-]*"
NAME = re.compile(rf"{PREFIX}({ID})((?:/\w[\w.-]*)*)(?:@(\w[\w.+-]*(?:/\w[\w.+-]*)*))?", re.ASCII)
COMMIT = re.compile(r"[0-9a-f]{40}")
CACHED = re.compile(r"/models--([^/]+?)--([^/]+)/snapshots/([0-9a-f]{40})((?:/[^/]+)*)$")  # the end of a cached path
SHOWN = 12  # characters of a commit in a title
ETAG = re.compile(r'(?:W/)?"?[\w-]+(?:[.:=][\w-]+)*"?', re.ASCII)  # the library names a file of its cache by it
SHA256 = re.compile(r"[0-9a-f]{64}")


class Repository(NamedTuple):
    """A folder of a repository at the Hub; `str` returns its name.

    Fields:
      id: OWNER/NAME.
      folder: path in the repository; "" for its root.
      revision: a branch, a tag or a commit; None for the repository's default branch.
    """

    id: str
    folder: str = ""
    revision: str | None = None

    def __str__(self) -> str:
        folder, revision = self.folder and f"/{self.folder}", f"@{self.revision}" if self.revision else ""
        return f"{PREFIX}{self.id}{folder}{revision}"

    @property
    def is_pinned(self) -> bool:
        """True if the revision is a commit."""
        return bool(self.revision and COMMIT.fullmatch(self.revision))


def is_name(text: object) -> bool:
    """Return True for text that begins as the name of a repository; it may be invalid."""
    return str(text).startswith(PREFIX)


def parse(name: str) -> Repository:
    """Return the repository of a name. Raises InputError if it is not of the form `hf:OWNER/NAME/FOLDER@REVISION`."""
    found = NAME.fullmatch(name)
    if not found or ".." in name or "--" in found[1] or found[1].endswith((".git", "-", ".")):
        raise InputError(
            f"{name[:200]!r} is no name of a repository; expected {PREFIX}OWNER/NAME, such as "
            f"{PREFIX}openai-community/gpt2, optionally with /FOLDER and @REVISION after it"
        )
    return Repository(found[1], found[2].removeprefix("/"), found[3])


def pinned(name: str, recorded: Mapping[str, str] | None = None) -> str:
    """Return a name with the commit that its revision is now.

    Args:
      name: the name.
      recorded: names with commits, by the names without revision, as `by_repository` returns them. They are used for a
        name without revision.

    Raises:
      InputError: there is no such repository or revision, no access, or neither a connection nor a cached commit.
    """
    repository = parse(name)
    if repository.is_pinned:
        return name
    if recorded and name in recorded:
        return recorded[name]
    library = require(LIBRARY)
    with one_line_errors(repository):
        api = library.HfApi(library_name=SENDER)
        commit = api.resolve_revision(repository.id, revision=repository.revision).resolved
    return str(repository._replace(revision=commit))


def by_repository(names: Sequence[str]) -> dict[str, str]:
    """Return the names that have a commit, by the same names without revision; the first of several counts."""
    found: dict[str, str] = {}
    for repository in map(parse, names):
        if repository.is_pinned:
            found.setdefault(str(repository._replace(revision=None)), str(repository))
    return found


def fetch(repository: Repository, names: Sequence[str]) -> Path:
    """Download those files of a repository's folder that exist; return the local folder, which is that of the cache.

    Files that are in the cache need no connection. A file appears in the folder when it is complete. The SHA-256 of a
    large file is compared with the Hub's when it has been downloaded.

    Args:
      repository: a repository with a commit.
      names: names of files in the folder.

    Raises:
      InputError: see `one_line_errors`; or a file has another SHA-256, and is removed.
    """
    library, prefix = require(LIBRARY), repository.folder and f"{repository.folder}/"
    paths = [prefix + name for name in names]

    def cached_file(path: str) -> object:
        return library.try_to_load_from_cache(repository.id, path, revision=repository.revision)

    with one_line_errors(repository):
        fresh = [path for path in paths if not cached_file(path)]
        try:
            root = library.snapshot_download(
                repository.id, revision=repository.revision, allow_patterns=paths, library_name=SENDER
            )
        finally:  # also of files that are complete when the download is interrupted
            found = [place for place in map(cached_file, fresh) if isinstance(place, str)]
            damaged = [text for text in map(_remove_damaged, map(Path, found)) if text]
    if damaged:
        raise InputError(f"cannot download {repository}: {damaged[0]}")
    return Path(root, repository.folder)


def _remove_damaged(path: Path) -> str:
    """Remove a downloaded file, and return why, if its SHA-256 is not the one that the Hub states; else return "".

    The cache names the content of a large file by it, and of others by a hash of Git, which is not compared.
    """
    content = path.resolve()  # of a link
    if not SHA256.fullmatch(content.name) or not content.is_file():
        return ""
    with content.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found == content.name:
        return ""
    content.unlink()
    path.unlink(missing_ok=True)
    stated = content.name[:SHOWN]
    return f"{path.name} has the SHA-256 {found[:SHOWN]}…, the Hub states {stated}…; the file is removed, try again"


def listing(repository: Repository, folder: Path) -> list[str]:
    """Return the names of the files in a repository's folder, after `fetch` has returned `folder`.

    They are those at the Hub; or those in the cache, if another program filled it and there is no connection.
    """
    library, prefix = require(LIBRARY), repository.folder and f"{repository.folder}/"
    try:
        tree = library.get_cached_repo_tree(repository.id, revision=repository.revision)
    except require(f"{LIBRARY}.errors").CachedRepoTreeNotFoundError:
        return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    paths = [file.path.removeprefix(prefix) for file in tree if file.path.startswith(prefix)]
    return sorted(path for path in paths if "/" not in path)


def file(name: str, wanted: str) -> Path:
    """Return the local path of one file of a repository, downloaded. Raises InputError also if there is no such file.

    Args:
      name: the name of a repository.
      wanted: the name of the file in the repository's folder.
    """
    repository = parse(pinned(name))
    path = fetch(repository, [wanted]) / wanted
    if not path.is_file():
        raise InputError(f"{name} has no {wanted}")
    return path


def cached(path: object) -> Repository | None:
    """Return the repository, with its commit, whose folder in the cache a path is; None for other paths."""
    found = CACHED.search(str(path))
    return Repository(f"{found[1]}/{found[2]}", found[4].removeprefix("/"), found[3]) if found else None


def title(path: PurePath) -> str:
    """Return a short name of a file or folder: its last part, or the repository and the commit of a cached one."""
    found = cached(path)
    if not found:
        return path.name or str(path)
    return "/".join(filter(None, (found.id, found.folder))) + f"@{str(found.revision)[:SHOWN]}"


@contextlib.contextmanager
def one_line_errors(repository: Repository, action: str = "download") -> Iterator[None]:
    """Convert any error of huggingface_hub inside the context to an InputError of one line.

    Args:
      repository: the repository, named in the message.
      action: "download", or "upload to".
    """
    kinds, constants = require(f"{LIBRARY}.errors"), require(f"{LIBRARY}.constants")
    endpoint, hooks = constants.ENDPOINT, require(LIBRARY).get_session().event_hooks
    require(LIBRARY).get_session().event_hooks = {**hooks, "response": [*hooks["response"], _response_check()]}
    try:
        yield
    except (InputError, MemoryError):
        raise
    except kinds.GatedRepoError:
        url = f"{endpoint}/{repository.id}"
        problem = f"the access is restricted: accept its terms at {url}, and set HF_TOKEN to a token of that account"
    except kinds.RepositoryNotFoundError:
        problem = f"no such repository at {endpoint}, or a private one that HF_TOKEN, or its absence, does not open"
    except kinds.RevisionNotFoundError:
        problem = f"the repository has no revision {repository.revision!r}"
    except kinds.HfHubHTTPError as e:
        status = e.response.status_code
        hint = "; check HF_TOKEN and its permissions" if status in (401, 403) else ""
        problem = f"{endpoint} answered with status {status}{hint}"
    except (kinds.RevisionResolutionError, kinds.LocalEntryNotFoundError, kinds.IncompleteSnapshotError):
        where = "HF_HUB_OFFLINE is set" if constants.is_offline_mode() else f"{endpoint} cannot be reached"
        problem = f"{where}, and the cache {constants.HF_HUB_CACHE} does not hold all files"
    except Exception as e:  # libraries for transfers have error types of their own
        problem = first_line_with_type(e)
    else:
        return
    finally:
        require(LIBRARY).get_session().event_hooks = hooks
    raise InputError(f"cannot {action} {repository}: {problem}") from None


def _response_check() -> Callable[[Any], None]:
    """Return a function that refuses answers which make the library write outside its cache, or never end.

    They are the name of a file's content (`ETag`, or the SHA-256 in a listing) that is not a plain name, and the next
    page of a listing that was already read.
    """
    pages = set[str]()

    def check(response: Any) -> None:
        request, answer = response.request, f"{require(f'{LIBRARY}.constants').ENDPOINT} answered with"
        tags = [response.headers.get(name) for name in ("ETag", "X-Linked-ETag")] if request.method == "HEAD" else []
        if wrong := next((tag for tag in tags if tag and not ETAG.fullmatch(tag)), None):
            raise InputError(f"{answer} the ETag {wrong!r:.60}, which is not the name of a file's content")
        if "/tree/" not in request.url.path or response.status_code != 200:
            return
        pages.add(str(request.url))
        if response.links.get("next", {}).get("url") in pages:
            raise InputError(f"{answer} a list of files that never ends: a page leads to an earlier one")
        response.read()
        sums = [(file.get("lfs") or {}).get("oid", "0" * 64) for file in response.json()]
        if wrong := next((each for each in sums if not SHA256.fullmatch(each)), None):
            raise InputError(f"{answer} the SHA-256 {wrong!r:.60}")

    return check
