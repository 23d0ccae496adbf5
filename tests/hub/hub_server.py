"""A Hub on the loopback: the endpoints that the client uses to fetch and to push models, and faults on demand.

Not a mock of the client: the real huggingface_hub talks HTTP to it. Repositories live in memory; a commit id is a
counter. Every request is recorded as (method, path, token sent or not).
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

LFS_BYTES = 10_000  # files from this size on go through LFS


@dataclass
class Fault:
    """Answer ``times`` requests whose "METHOD path" matches ``pattern`` with an error; cut: send half of the body."""

    pattern: str
    status: int
    times: int = 10**6
    headers: dict[str, str] = field(default_factory=dict)
    cut: bool = False


@dataclass
class Hub:
    """The state: repositories as commit -> files, large objects, faults, and what was asked."""

    commits: dict[str, dict[str, dict[str, bytes]]] = field(default_factory=dict)  # repo -> commit -> files
    heads: dict[str, str] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    visibility: dict[str, str | None] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    requests: list[tuple[str, str, bool]] = field(default_factory=list)
    uploads: list[str] = field(default_factory=list)
    ranges: list[tuple[str, int, int]] = field(default_factory=list)
    pull_requests: int = 0
    token: str = ""
    garble: bool = False
    delay: float = 0.0  # seconds before each file
    lock: threading.RLock = field(default_factory=threading.RLock)

    def commit(self, repo: str, files: dict[str, bytes], *, head: bool = True) -> str:
        """A new commit of all ``files``."""
        with self.lock:
            known = self.commits.setdefault(repo, {})
            name = hashlib.sha1(f"{repo}{len(known)}".encode()).hexdigest()
            known[name] = dict(files)
            if head:
                self.heads[repo] = name
            return name

    def files(self, repo: str) -> dict[str, bytes]:
        """What the main branch holds."""
        return self.commits[repo][self.heads[repo]]

    def asked(self, pattern: str) -> int:
        """How many requests matched."""
        return sum(bool(re.search(pattern, f"{m} {p}")) for m, p, _ in self.requests)


def serve(hub: Hub) -> tuple[ThreadingHTTPServer, str]:
    """Start it on a free port; the caller shuts it down."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def reply(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            for key, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def json(self, data: Any) -> None:
            self.reply(200, json.dumps(data).encode(), {"Content-Type": "application/json"})

        def missing(self, code: str) -> None:
            self.reply(404, b"{}", {"X-Error-Code": code, "X-Error-Message": code})

        def answer(self) -> None:
            size = int(self.headers.get("Content-Length") or 0)
            if self.headers.get("Transfer-Encoding") == "chunked":
                body = b""
                while length := int(self.rfile.readline(), 16):
                    body += self.rfile.read(length)
                    self.rfile.readline()
                self.rfile.readline()
            else:
                body = self.rfile.read(size)
            path = unquote(urlsplit(self.path).path)
            self.query = urlsplit(self.path).query
            with hub.lock:
                sent = self.headers.get("Authorization")
                hub.requests.append((self.command, path, sent is not None))
                for fault in hub.faults:
                    if fault.times and not fault.cut and re.search(fault.pattern, f"{self.command} {path}"):
                        fault.times -= 1
                        return self.reply(fault.status, b'{"error": "fault"}', fault.headers)
                if hub.token and sent != f"Bearer {hub.token}" and not path.startswith("/objects/"):
                    return self.reply(401, b"{}", {"X-Error-Message": "Invalid credentials"})
                self.route(path, body)

        do_GET = do_HEAD = do_POST = do_PUT = answer

        def route(self, path: str, body: bytes) -> None:
            table = (
                (r"/api/repos/create", self.create),
                (r"/api/validate-yaml", lambda body: self.json({"errors": [], "warnings": []})),
                (r"/api/models/(\w+/[\w.-]+)/preupload/(.+)", self.preupload),
                (r"/api/models/(\w+/[\w.-]+)/commit/(.+)", self.receive),
                (r"/api/models/(\w+/[\w.-]+)/tree/([^/]+)(?:/.*)?", self.tree),
                (r"/api/models/(\w+/[\w.-]+)(?:/revision/(.+))?", self.info),
                (r"/(\w+/[\w.-]+)\.git/info/lfs/objects/batch", self.batch),
                (r"/objects/(\w+)", self.store),
                (r"/(\w+/[\w.-]+)/resolve/([^/]+)/(.+)", self.file),
            )
            for pattern, method in table:
                match = re.fullmatch(pattern, path)
                if match:
                    return method(*match.groups(), body)
            self.missing("EntryNotFound")

        def at(self, repo: str, revision: str | None) -> tuple[str, dict[str, bytes]] | None:
            known = hub.commits.get(repo)
            if known is None:
                self.missing("RepoNotFound")
                return None
            commit = hub.heads[repo] if revision in (None, "main") else str(revision)
            if commit not in known:
                self.missing("RevisionNotFound")
                return None
            return commit, known[commit]

        def info(self, repo: str, revision: str | None, body: bytes) -> None:
            if (found := self.at(repo, revision)) is not None:
                entries = [self.sibling(n, d) for n, d in sorted(found[1].items())]
                about = {"_id": "1", "id": repo, "sha": found[0], "tags": []}
                self.json(about | {"private": hub.visibility.get(repo) == "private", "siblings": entries})

        def sibling(self, name: str, data: bytes) -> dict[str, Any]:
            entry: dict[str, Any] = {"rfilename": name, "size": len(data), "blobId": "0" * 40}
            if len(data) >= LFS_BYTES:
                digest = hashlib.sha256(data).hexdigest()
                entry["lfs"] = {"size": len(data), "sha256": digest, "pointerSize": 130}
            return entry

        def tree(self, repo: str, revision: str, body: bytes) -> None:
            if (found := self.at(repo, revision)) is not None:
                items = [
                    {"type": "file", "path": n, "size": len(d), "oid": hashlib.sha1(d).hexdigest()}
                    for n, d in sorted(found[1].items())
                ]
                self.json(items)

        def file(self, repo: str, revision: str, name: str, body: bytes) -> None:
            if (found := self.at(repo, revision)) is None:
                return
            if name not in found[1]:
                return self.missing("EntryNotFound")
            if hub.delay:
                time.sleep(hub.delay)
            data = found[1][name]
            headers = {
                "ETag": f'"{hashlib.sha256(data).hexdigest()}"',
                "X-Repo-Commit": found[0],
                "Accept-Ranges": "bytes",
            }
            asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
            first = int(asked[1]) if asked else 0
            last = min(int(asked[2]) if asked and asked[2] else len(data) - 1, len(data) - 1)
            if asked:
                headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
                hub.ranges.append((name, first, last + 1))
            for fault in hub.faults:
                if fault.cut and fault.times and self.command == "GET" and re.search(fault.pattern, name):
                    fault.times -= 1
                    self.send_response(200)
                    for key, value in {**headers, "Content-Length": str(len(data))}.items():
                        self.send_header(key, value)
                    self.end_headers()
                    self.wfile.write(data[: len(data) // 2])
                    self.close_connection = True
                    return
            self.reply(206 if asked else 200, data[first : last + 1], headers)

        def create(self, body: bytes) -> None:
            asked = json.loads(body)
            repo = f"{asked['organization'] or 'me'}/{asked['name']}"
            url = f"http://{self.headers['Host']}/{repo}"
            if repo in hub.commits:
                return self.reply(409, json.dumps({"url": url, "error": "exists"}).encode())
            hub.visibility[repo] = asked.get("visibility")
            hub.commit(repo, {".gitattributes": b""})
            self.json({"url": url})

        def preupload(self, repo: str, revision: str, body: bytes) -> None:
            held = hub.files(repo)
            answer = []
            for item in json.loads(body)["files"]:
                large = item["size"] >= LFS_BYTES
                data = held.get(item["path"])
                oid = None
                if data is not None:
                    blob = b"blob %d\0%s" % (len(data), data)
                    oid = hashlib.sha256(data).hexdigest() if large else hashlib.sha1(blob).hexdigest()
                mode = "lfs" if large else "regular"
                answer.append({"path": item["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid})
            self.json({"files": answer})

        def batch(self, repo: str, body: bytes) -> None:
            objects = []
            for item in json.loads(body)["objects"]:
                entry: dict[str, Any] = {"oid": item["oid"], "size": item["size"]}
                if item["oid"] not in hub.objects:
                    href = f"http://{self.headers['Host']}/objects/{item['oid']}"
                    entry["actions"] = {"upload": {"href": href, "header": {}}}
                objects.append(entry)
            self.json({"transfer": "basic", "objects": objects})

        def store(self, oid: str, body: bytes) -> None:
            assert hashlib.sha256(body).hexdigest() == oid
            hub.objects[oid] = body
            hub.uploads.append(oid)
            self.reply(200)

        def receive(self, repo: str, revision: str, body: bytes) -> None:
            files = dict(hub.files(repo))
            for line in body.splitlines():
                item = json.loads(line)
                value = item["value"]
                if item["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                elif item["key"] == "lfsFile":
                    files[value["path"]] = hub.objects[value["oid"]]
                elif item["key"] == "deletedFile":
                    del files[value["path"]]
            if hub.garble:
                name = max(files, key=lambda n: len(files[n]))
                files[name] = files[name][:-1] + b"\xff"
            request = "create_pr=1" in self.query
            commit = hub.commit(repo, files, head=not request)
            url = f"http://{self.headers['Host']}/{repo}"
            answer = {"commitUrl": f"{url}/commit/{commit}", "commitOid": commit}
            if request:
                hub.pull_requests += 1
                answer["pullRequestUrl"] = f"{url}/discussions/{hub.pull_requests}"
            self.json(answer)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    return server, f"http://127.0.0.1:{server.server_address[1]}"
