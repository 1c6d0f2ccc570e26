"""A server that answers huggingface_hub 2.4 and datasets 5.2 as the hub does: models and datasets
with branches, tags and commits.
"""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

Files = dict[str, bytes]


def files_in(folder: Path) -> Files:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@dataclass
class Hub:
    """Repositories by kind and name, such as "models/org/tiny": revision -> commit, and commit ->
    files.
    """

    url: str = ""
    refs: dict[str, dict[str, str]] = field(default_factory=dict)
    commits: dict[str, Files] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)  # requested paths

    def commit(self, repository: str, files: Files, *revisions: str) -> str:
        """Add a commit, point the revisions ("main" by default) to it, and return the commit's
        hash.
        """
        commit = hashlib.sha1(
            json.dumps(
                [repository, *sorted((name, content.hex()) for name, content in files.items())]
            ).encode()
        ).hexdigest()
        self.commits[commit] = files
        self.refs.setdefault(repository, {}).update(dict.fromkeys(revisions or ("main",), commit))
        return commit

    def find(self, repository: str, revision: str) -> str | None:
        commit = self.refs[repository].get(revision, revision)
        return commit if commit in self.commits else None


def _described(name: str, content: bytes) -> dict[str, Any]:
    return {
        "type": "file",
        "path": name,
        "rfilename": name,
        "size": len(content),
        "oid": hashlib.sha1(content).hexdigest(),
    }


@contextmanager
def serve() -> Iterator[Hub]:
    """Run a hub on a free port of this machine; HF_ENDPOINT must be its `url`."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path).strip("/")
            hub.asked.append(path)
            if found := re.fullmatch(
                r"api/(models|datasets)/([^/]+/[^/]+)(?:/(revision|tree)/(.+))?", path
            ):
                self._tell(f"{found[1]}/{found[2]}", found[3] or "revision", found[4] or "main")
            elif found := re.fullmatch(r"(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
                self._give(
                    "datasets/" * bool(found[1]) + found[2] if found[1] else f"models/{found[2]}",
                    found[3],
                    found[4],
                )
            else:
                self._answer(404, b"{}", {"X-Error-Code": "EntryNotFound"})

        do_HEAD = do_GET

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            path = unquote(urlsplit(self.path).path).strip("/")
            hub.asked.append(path)
            found = re.fullmatch(r"api/(models|datasets)/([^/]+/[^/]+)/paths-info/(.+)", path)
            commit = hub.find(f"{found[1]}/{found[2]}", found[3]) if found else None
            if commit is None:
                self._answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
                return
            text = body.decode()
            wanted = (
                json.loads(text)["paths"]
                if text.startswith("{")
                else [
                    unquote(part.partition("=")[2])
                    for part in text.split("&")
                    if part.startswith("paths=")
                ]
            )
            self._json(
                [
                    _described(name, content)
                    for name, content in hub.commits[commit].items()
                    if name in wanted
                ]
            )

        def _tell(self, repository: str, what: str, revision: str) -> None:
            if repository not in hub.refs:
                self._answer(401, b"{}", {"X-Error-Code": "RepoNotFound"})
                return
            base, _, below = revision.partition("/") if what == "tree" else (revision, "", "")
            commit = hub.find(repository, base)
            if commit is None:
                self._answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
                return
            files = [
                _described(name, content)
                for name, content in hub.commits[commit].items()
                if name.startswith(below)
            ]
            if what == "tree":
                folders = {
                    name.rpartition("/")[0]
                    for name in hub.commits[commit]
                    if "/" in name and name.startswith(below)
                }
                self._json(
                    files
                    + [
                        {"type": "directory", "path": name, "oid": "0" * 40}
                        for name in sorted(folders)
                        if name != below
                    ]
                )
            else:
                name = repository.partition("/")[2]
                self._json(
                    {
                        "id": name,
                        "sha": commit,
                        "siblings": files,
                        "private": False,
                        "gated": False,
                        "tags": [],
                        "downloads": 0,
                    }
                )

        def _give(self, repository: str, revision: str, name: str) -> None:
            if repository not in hub.refs:
                self._answer(401, b"", {"X-Error-Code": "RepoNotFound"})
                return
            commit = hub.find(repository, revision)
            if commit is None or name not in hub.commits[commit]:
                self._answer(
                    404,
                    b"",
                    {
                        "X-Error-Code": "EntryNotFound",
                        **({"X-Repo-Commit": commit} if commit else {}),
                    },
                )
                return
            content, more = (
                hub.commits[commit][name],
                {"X-Repo-Commit": commit, "Accept-Ranges": "bytes"},
            )
            more["ETag"] = f'"{hashlib.sha1(content).hexdigest()}"'
            wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
            if wanted is None:
                self._answer(200, content, more)
                return
            first, last = int(wanted[1]), min(int(wanted[2] or len(content)), len(content) - 1)
            self._answer(
                206,
                content[first : last + 1],
                more | {"Content-Range": f"bytes {first}-{last}/{len(content)}"},
            )

        def _json(self, value: Any) -> None:
            self._answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

        def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, *rest: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


def write_cache(cache: Path, repository: str, files: Files, commit: str, *revisions: str) -> Path:
    """Write a commit into a cache in huggingface_hub's layout (blobs, links and refs), and return
    its snapshot.
    """
    folder = cache / repository.replace("/", "--")
    snapshot = folder / "snapshots" / commit
    for name, content in files.items():
        blob = folder / "blobs" / hashlib.sha1(content).hexdigest()
        for path in (blob, snapshot / name):
            path.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(content)
        (snapshot / name).symlink_to(
            Path(*[".."] * (len(Path(name).parts) + 1), "blobs", blob.name)
        )
    for revision in revisions:
        ref = folder / "refs" / revision
        ref.parent.mkdir(parents=True, exist_ok=True)
        ref.write_text(commit)
    return snapshot
