"""Fake of the Hugging Face Hub: the part of its HTTP API that huggingface_hub uses for models, without Xet.

    with fake_hub.serve() as hub:
        hub.commit("owner/name", {"config.json": b"{}"})
        fake_hub.use(monkeypatch, hub, cache)

Commits are named by a hash of their parent and content. A file is an LFS object if `Hub.lfs` has it.
"""

import base64
import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

TOKEN = "hf_secret_of_the_tests"
OWNER = "owner"  # of the token
REPOSITORY = r"(?P<id>[\w.-]+/[\w.-]+)"
ROUTES = {
    ("GET", "/api/whoami-v2"): "whoami",
    ("POST", "/api/repos/create"): "create",
    ("POST", "/api/validate-yaml"): "validate",
    ("GET", rf"/api/models/{REPOSITORY}(?:/revision/(?P<revision>[^/]+))?"): "info",
    ("GET", rf"/api/models/{REPOSITORY}/tree/(?P<revision>[^/]+)"): "tree",
    ("POST", rf"/api/models/{REPOSITORY}/preupload/(?P<revision>[^/]+)"): "preupload",
    ("POST", rf"/api/models/{REPOSITORY}/commit/(?P<revision>[^/]+)"): "commit",
    ("GET", rf"/{REPOSITORY}/resolve/(?P<revision>[^/]+)/(?P<path>.+)"): "resolve",
}


def blob(data: bytes) -> str:
    """Return Git's name of the content of a file."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class RefusedError(Exception):
    """An answer with an error status and the Hub's name of the error."""

    def __init__(self, status: int, code: str = ""):
        super().__init__(status, code)
        self.status, self.code = status, code


class Hub:
    """The repositories. Tests may change them, and the ways in which requests fail.

    Fields:
      commits: the files of each commit by repository, commit and path.
      branches: the latest commit by repository and branch.
      private: repositories that need the token.
      lfs: the SHA-256 that is stated of a file, by its path.
      etags: headers ETag that are sent instead of the right ones, by path.
      loops: True for listings of which each page says that it is followed by itself.
      broken: how often the connection is closed in the middle of a file, by its path; "upload" for an upload.
      requests: all, in order: method and path.
    """

    def __init__(self) -> None:
        self.commits: dict[str, dict[str, dict[str, bytes]]] = {}
        self.branches: dict[str, dict[str, str]] = {}
        self.private: set[str] = set()
        self.lfs: dict[str, str] = {}
        self.etags: dict[str, str] = {}
        self.loops = False
        self.broken: dict[str, int] = {}
        self.requests: list[tuple[str, str]] = []
        self.url = ""

    def commit(self, name: str, files: Mapping[str, bytes | None], branch: str = "main") -> str:
        """Add a commit, in which None removes a file; return its name. A new repository is made."""
        branches, commits = self.branches.setdefault(name, {}), self.commits.setdefault(name, {})
        parent = branches.get(branch, "")
        content = {**commits.get(parent, {}), **files}
        content = {path: data for path, data in content.items() if data is not None}
        digest = hashlib.sha1(f"{name} {parent}".encode())
        for path in sorted(content):
            digest.update(path.encode() + content[path])
        commits[digest.hexdigest()] = content
        branches[branch] = digest.hexdigest()
        return branches[branch]

    def upload(self, name: str, folder: Path, branch: str = "main") -> str:
        """Commit the files of a folder."""
        return self.commit(name, {path.name: path.read_bytes() for path in folder.iterdir()}, branch)

    def files(self, name: str, revision: str) -> tuple[str, dict[str, bytes]]:
        """Return the commit of a revision, and its files by path."""
        commit = self.branches[name].get(revision, revision)
        if commit not in self.commits[name]:
            raise RefusedError(404, "RevisionNotFound")
        return commit, self.commits[name][commit]


class Handler(BaseHTTPRequestHandler):
    """Answers a request by the method that `ROUTES` names."""

    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def do_GET(self) -> None:
        """Answer a request; HEAD as GET, but without content."""
        method, path = self.command.replace("HEAD", "GET"), urlsplit(self.path).path
        self.hub.requests.append((self.command, path))
        self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        try:
            for (verb, pattern), name in ROUTES.items():
                if verb == method and (found := re.fullmatch(pattern, path)):
                    groups = {key: unquote(value) for key, value in found.groupdict().items() if value}
                    if "id" in groups:
                        self._check_access(groups["id"])
                    return getattr(self, name)(**groups)
            raise RefusedError(404)
        except RefusedError as e:
            self._send(b"{}", e.status, {"X-Error-Code": e.code} if e.code else {})

    do_HEAD = do_POST = do_GET  # noqa: N815 - the library's names

    def _check_access(self, name: str) -> None:
        authorized = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if name not in self.hub.branches or (name in self.hub.private and not authorized):
            raise RefusedError(404 if authorized else 401, "RepoNotFound")

    def _check_writer(self) -> None:
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            raise RefusedError(401)

    def _json(self, content: object, status: int = 200, headers: Mapping[str, str] = {}) -> None:
        self._send(json.dumps(content).encode(), status, {"Content-Type": "application/json", **headers})

    def _send(self, content: bytes, status: int = 200, headers: Mapping[str, str] = {}, path: str = "") -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            is_broken = self.hub.broken.get(path, 0) > 0
            if is_broken:
                self.hub.broken[path] -= 1
            self.wfile.write(content[: len(content) // 2] if is_broken else content)
            self.close_connection = is_broken

    def whoami(self) -> None:
        """Name the owner of the token."""
        self._check_writer()
        self._json({"type": "user", "name": OWNER})

    def validate(self) -> None:
        """Accept any metadata of a card."""
        self._json({"errors": [], "warnings": []})

    def create(self) -> None:
        """Create a repository of the token's owner."""
        self._check_writer()
        asked = json.loads(self.body)
        name = f"{OWNER}/{asked['name']}"
        if name in self.hub.branches:
            return self._json({"error": "exists", "url": f"{self.hub.url}/{name}"}, 409)
        self.hub.commit(name, {".gitattributes": b""})
        if asked.get("visibility") == "private":
            self.hub.private.add(name)
        return self._json({"url": f"{self.hub.url}/{name}"})

    def info(self, id: str, revision: str = "main") -> None:
        """Describe a repository and the commit of a revision."""
        commit, files = self.hub.files(id, revision)
        siblings = [{"rfilename": path} for path in files]
        self._json({"id": id, "sha": commit, "private": id in self.hub.private, "siblings": siblings})

    def tree(self, id: str, revision: str) -> None:
        """List all files of a commit."""
        found = []
        for path, data in self.hub.files(id, revision)[1].items():
            lfs = {"lfs": {"oid": self.hub.lfs.get(path), "size": len(data), "pointerSize": 100}}
            file = {"type": "file", "path": path, "size": len(data), "oid": blob(data)}
            found.append(file | (lfs if path in self.hub.lfs else {}))
        self._json(found, headers={"Link": f'<{self.hub.url}{self.path}>; rel="next"'} if self.hub.loops else {})

    def resolve(self, id: str, revision: str, path: str) -> None:
        """Send a file, or the rest of it that the header Range asks for."""
        commit, files = self.hub.files(id, revision)
        if path not in files:
            raise RefusedError(404, "EntryNotFound")
        data = files[path]
        start = int(re.sub(r"bytes=(\d+)-", r"\1", self.headers.get("Range", "bytes=0-")))
        ranges = {"Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}"} if start else {}
        etag = self.hub.etags.get(path, f'"{self.hub.lfs.get(path, blob(data))}"')
        headers = {"X-Repo-Commit": commit, "ETag": etag, **ranges}
        self._send(data[start:], 206 if start else 200, headers, path)

    def preupload(self, id: str, revision: str) -> None:
        """Say that files are to be uploaded in the commit."""
        self._check_writer()
        held, paths = self.hub.files(id, revision)[1], [file["path"] for file in json.loads(self.body)["files"]]
        oids = {path: blob(held[path]) if path in held else None for path in paths}
        answer = {"uploadMode": "regular", "shouldIgnore": False}
        self._json({"files": [{"path": path, "oid": oid, **answer} for path, oid in oids.items()]})

    def commit(self, id: str, revision: str) -> None:
        """Add a commit of files and deletions."""
        self._check_writer()
        if self.hub.broken.get("upload"):
            self.hub.broken["upload"] -= 1
            raise RefusedError(507)
        files: dict[str, bytes | None] = {}
        for line in self.body.splitlines():
            item = json.loads(line)
            key, value = item["key"], item["value"]
            if key == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif key == "deletedFile":
                files[value["path"]] = None
        commit = self.hub.commit(id, files, revision)
        self._json({"commitUrl": f"{self.hub.url}/{id}/commit/{commit}", "commitOid": commit})


@contextlib.contextmanager
def serve() -> Iterator[Hub]:
    """Context manager: a hub that answers requests until the context ends."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("HubHandler", (Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


def use(monkeypatch, hub: Hub, cache: Path) -> None:
    """Let huggingface_hub, which read its environment when it was imported, use a hub and a cache."""
    from huggingface_hub import constants

    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_HOME", str(cache))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(cache / "token"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
