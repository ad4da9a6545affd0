"""Stand-ins for the two hubs, which no test can reach: small HTTP servers that speak the part of
their APIs which huggingface_hub and modelscope use here. The clients are the real ones.

    with serving(HuggingFace()) as hub:
        hub.repos["models/tiny/qwen"] = Repo({"main": {"config.json": b"{}"}})
        ...                                   # with HF_ENDPOINT=hub.url
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

Files = dict[str, bytes]


def short_id(value: object) -> str:
    """Returns a parameter's part of a test's name, which is the same in every process."""
    return getattr(value, "__name__", str(value))[:40]


def files_of(folder: Path) -> Files:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def sha(files: Files) -> str:
    """The commit of a branch: 40 digits that change with its files."""
    named = {path: hashlib.sha1(data).hexdigest() for path, data in files.items()}
    return hashlib.sha1(json.dumps(named, sort_keys=True).encode()).hexdigest()


@dataclass
class Repo:
    branches: dict[str, Files]  # or tags
    private: bool = False
    gated: bool = False
    messages: list[str] = field(default_factory=list)  # of commits that were pushed

    def at(self, revision: str) -> Files | None:
        by_commit = {sha(files): files for files in self.branches.values()}
        return self.branches.get(revision, by_commit.get(revision))


class Answer(NamedTuple):
    status: int
    body: Any = b""  # bytes, or what becomes JSON
    headers: dict[str, str] = {}  # noqa: RUF012  never changed


def refused(status: int, code: str, message: str) -> Answer:
    return Answer(status, {"error": message}, {"X-Error-Code": code, "X-Error-Message": message})


@dataclass
class Hub(ABC):
    repos: dict[str, Repo] = field(default_factory=dict)  # by "models/owner/name" or "datasets/..."
    tokens: dict[str, str] = field(default_factory=lambda: {"good": "tiny", "reader": "guest"})
    asked: list[str] = field(default_factory=list)  # "GET /path" of every request
    blobs: dict[str, bytes] = field(default_factory=dict)  # uploaded, by sha256
    broken: bool = False  # answers 503 to everything
    url: str = ""

    def user(self, headers: Any) -> str | None:
        return self.tokens.get(headers.get("Authorization", "").removeprefix("Bearer "))

    @abstractmethod
    def answer(self, path: str, query: dict[str, str], headers: Any, body: bytes) -> Answer:
        """Answers a request. query: of its address."""


class HuggingFace(Hub):
    """https://huggingface.co/docs/hub/api, as huggingface_hub 2.4 calls it, without Xet."""

    def answer(self, path: str, query: dict[str, str], headers: Any, body: bytes) -> Answer:
        if path == "/api/whoami-v2":
            user = self.user(headers)
            return Answer(200, {"name": user, "type": "user"}) if user else Answer(401, {})
        if path == "/api/repos/create":
            return self.create(json.loads(body), self.user(headers))
        if path == "/api/validate-yaml":
            return Answer(200, {"warnings": [], "errors": []})
        if path.startswith("/blobs/"):
            self.blobs[path.removeprefix("/blobs/")] = body
            return Answer(200)
        if path.endswith(".git/info/lfs/objects/batch"):
            return self.batch(json.loads(body))
        if path.startswith(("/api/models/", "/api/datasets/")):
            kind, owner, name, action, *rest = [*path.removeprefix("/api/").split("/"), ""]
            key, revision = f"{kind}/{owner}/{name}", unquote("/".join(rest).rstrip("/"))
            return self.repo_api(key, action, revision, headers, body)
        if "/resolve/" not in path:
            return Answer(404)
        left, _, right = path.partition("/resolve/")
        revision, _, file = right.partition("/")
        key = left[1:] if left.startswith("/datasets/") else f"models{left}"
        return self.file(key, unquote(revision), unquote(file), headers)

    def found(self, key: str, headers: Any) -> Repo | Answer:
        repo = self.repos.get(key)
        if repo is None or (repo.private and self.user(headers) != "tiny"):
            if self.user(headers) is None:  # as the Hub, which does not tell which are private
                return refused(401, "RepoNotFound", "Invalid username or password.")
            return refused(404, "RepoNotFound", "Repository not found")
        return repo

    def repo_api(self, key: str, action: str, revision: str, headers: Any, body: bytes) -> Answer:
        repo = self.found(key, headers)
        if isinstance(repo, Answer):
            return repo
        files = repo.at(revision or "main")
        if files is None:
            return refused(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        if action in ("", "revision"):
            name = key.partition("/")[2]
            return Answer(200, {"id": name, "sha": sha(files), "private": repo.private,
                                "gated": "auto" if repo.gated else False})  # fmt: skip
        if action == "tree":
            return Answer(200, [self.entry(path, data) for path, data in files.items()])
        if self.user(headers) != "tiny":
            return refused(403, "", "You have no right to write here")
        if action == "preupload":
            modes = [{"path": file["path"], "shouldIgnore": False, "oid": None,
                      "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular"}
                     for file in json.loads(body)["files"]]  # fmt: skip
            return Answer(200, {"files": modes})
        return self.commit(key, repo, body)

    def entry(self, path: str, data: bytes) -> dict[str, Any]:
        found = {
            "type": "file",
            "path": path,
            "size": len(data),
            "oid": hashlib.sha1(data).hexdigest(),
        }
        if path.endswith((".safetensors", ".parquet")):
            digest = hashlib.sha256(data).hexdigest()
            found["lfs"] = {"oid": digest, "size": len(data), "pointerSize": 134}
        return found

    def file(self, key: str, revision: str, path: str, headers: Any) -> Answer:
        repo = self.found(key, headers)
        if isinstance(repo, Answer):
            return repo
        if repo.gated and self.user(headers) != "tiny":
            status = 401 if self.user(headers) is None else 403
            return refused(status, "GatedRepo", f"Access to {key} is restricted.")
        files = repo.at(revision)
        if files is None or path not in files:
            return refused(404, "EntryNotFound", "Entry not found")
        etag = hashlib.sha256(files[path]).hexdigest()
        return Answer(200, files[path], {"ETag": f'"{etag}"', "X-Repo-Commit": sha(files)})

    def create(self, asked: dict[str, Any], user: str | None) -> Answer:
        owner = asked.get("organization") or user
        if user is None:
            return Answer(401, {"error": "Invalid username or password."})
        if owner != user:
            return Answer(
                403, {"error": f"You don't have the rights to create a model under {owner}"}
            )
        key = f"models/{owner}/{asked['name']}"
        if key in self.repos:
            url = f"{self.url}/{owner}/{asked['name']}"
            return Answer(409, {"error": "You already created this model repo", "url": url})
        private = asked.get("private", False) or asked.get("visibility") == "private"
        self.repos[key] = Repo({"main": {}}, private=private)
        return Answer(200, {"url": f"{self.url}/{owner}/{asked['name']}"})

    def batch(self, asked: dict[str, Any]) -> Answer:
        objects = [
            {**each, "actions": {"upload": {"href": f"{self.url}/blobs/{each['oid']}"}}}
            for each in asked["objects"]
        ]
        return Answer(200, {"transfer": "basic", "objects": objects})

    def commit(self, key: str, repo: Repo, body: bytes) -> Answer:
        files = dict(repo.branches["main"])
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "header":
                repo.messages.append(value["summary"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.blobs[value["oid"]]
            else:
                files[value["path"]] = base64.b64decode(value["content"])
        repo.branches["main"] = files
        name = key.partition("/")[2]
        return Answer(200, {"commitUrl": f"{self.url}/{name}/commit/{sha(files)}",
                            "commitOid": sha(files)})  # fmt: skip


class ModelScope(Hub):
    """https://modelscope.cn/api/v1, as modelscope 1.40 and modelscope_hub 0.5 call it."""

    def answer(self, path: str, query: dict[str, str], headers: Any, body: bytes) -> Answer:
        parts = path.removeprefix("/api/v1/").removeprefix("repos/").split("/")
        if path.startswith("/blobs/"):
            self.blobs[path.removeprefix("/blobs/")] = body
            return Answer(200)
        if path == "/api/v1/models":
            return self.create(json.loads(body), headers)
        if len(parts) < 3:
            return self.said(404, path)
        repo = self.repos.get("/".join(parts[:3]))
        if repo is None or (repo.private and not self.user(headers)):
            return self.said(404, "record not found")
        return self.repo_api(repo, "/".join(parts[3:]), query, headers, body)

    def repo_api(
        self, repo: Repo, action: str, query: dict[str, str], headers: Any, body: bytes
    ) -> Answer:  # fmt: skip
        files = repo.at(query.get("Revision", "master"))
        if files is None:
            return self.said(404, "the revision does not exist")
        if action in ("repo/files", "repo/tree"):
            entries = [
                {"Path": path, "Name": path.rpartition("/")[2], "Type": "blob", "Size": len(data),
                 "Sha256": hashlib.sha256(data).hexdigest()}
                for path, data in files.items()
            ]  # fmt: skip
            return self.done({"Files": entries})
        if action == "repo":
            if repo.gated and not self.user(headers):
                return self.said(403, "access denied")
            return Answer(200, files[query["FilePath"]])
        if action == "info/lfs/objects/batch":
            objects = [
                {**each, "actions": {"upload": {"href": f"{self.url}/blobs/{each['oid']}"}}}
                for each in json.loads(body)["objects"]
            ]
            return self.done({"objects": objects})
        if action.startswith("commit/"):
            return self.commit(repo, json.loads(body))
        return self.done({"Visibility": 1 if repo.private else 5})

    def create(self, asked: dict[str, Any], headers: Any) -> Answer:
        if self.user(headers) != asked["Path"]:
            return self.said(403, "you cannot create a model there")
        key = f"models/{asked['Path']}/{asked['Name']}"
        if key in self.repos:
            return self.said(409, "the model already exists")
        self.repos[key] = Repo({"master": {}}, private=asked["Visibility"] == 1)
        return self.done({})

    def commit(self, repo: Repo, asked: dict[str, Any]) -> Answer:
        for each in asked["actions"]:
            is_large = each["type"] == "lfs"
            content = self.blobs[each["sha256"]] if is_large else base64.b64decode(each["content"])
            repo.branches["master"][each["path"]] = content
        repo.messages.append(asked["commit_message"])
        return self.done({})

    def done(self, data: Any) -> Answer:
        return Answer(200, {"Code": 200, "Success": True, "Data": data})

    def said(self, status: int, message: str) -> Answer:
        return Answer(status, {"Code": status, "Success": False, "Message": message})


@contextmanager
def serving(hub: Any) -> Iterator[Any]:
    """Serves a hub on a port of its own until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_any(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            parts = urlsplit(self.path)
            query = {key: values[0] for key, values in parse_qs(parts.query).items()}
            hub.asked.append(f"{self.command} {parts.path}")
            found = Answer(503) if hub.broken else hub.answer(
                parts.path, query, self.headers, body
            )  # fmt: skip
            is_bytes = isinstance(found.body, bytes)
            data = found.body if is_bytes else json.dumps(found.body).encode()
            self.send_response(found.status)
            kind = "application/octet-stream" if is_bytes else "application/json"
            for name, value in ({"Content-Type": kind} | found.headers).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        do_GET = do_HEAD = do_POST = do_PUT = handle_any

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
