"""A Hub on this machine that speaks as much of the protocol as huggingface_hub asks for, and sessions with it."""

import base64
import contextlib
import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

TOKEN = "hf_of_the_tests"
SESSION = """
import json, sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from axonn_jax.cli.main import main
for words in json.load(sys.stdin):
    out, err = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        status = main(words)
    print(json.dumps([status, out.getvalue(), err.getvalue()]))
"""


class Hub:
    """Repositories by kind and name: commits of files, and branches."""

    def __init__(self):
        self.commits, self.refs, self.closed = {}, {}, {}
        self.uploaded, self.created, self.asked = {}, [], []

    def commit(self, repo, files, kind="model", branch="main"):
        """Puts files into a new commit of a branch, which has them alone, and returns its name."""
        sha = hashlib.sha1(repr((repo, branch, sorted(files.items()))).encode()).hexdigest()
        self.commits.setdefault((kind, repo), {})[sha] = dict(files)
        self.refs.setdefault((kind, repo), {})[branch] = sha
        return sha

    def files(self, repo, kind="model"):
        return self.commits[kind, repo][self.refs[kind, repo]["main"]]


def files_of(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@contextlib.contextmanager
def serving(hub):
    """Gives the URL of a server of a hub."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def session(url, home, commands, **variables):
    """What each command of one process prints, as (status, out, err); `home` has its cache."""
    own = {"HF_ENDPOINT": url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    words = [[*map(str, command)] for command in commands]
    done = subprocess.run(
        [sys.executable, "-c", SESSION],
        env=kept | own | variables, input=json.dumps(words), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self._answer(b"")

    do_GET = do_HEAD

    def do_POST(self):
        self._answer(self.rfile.read(int(self.headers.get("Content-Length") or 0)))

    do_PUT = do_POST

    def _answer(self, body):
        path = unquote(urlsplit(self.path).path)
        self.hub.asked.append(f"{self.command} {path}")
        for pattern, answer in self.ROUTES:
            if match := re.fullmatch(pattern, path):
                return answer(self, body, **match.groupdict())
        return self._say(404)

    def _say(self, status, content=b"", **headers):
        raw = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": len(raw), **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(raw)

    def _commit(self, kind, repo, revision):
        """The name and the files of a commit, or None where the answer is an error."""
        key = (kind or "model").removesuffix("s"), repo
        if key not in self.hub.commits or self.hub.closed.get(repo) == "private":
            self._say(401, X_Error_Code="RepoNotFound", X_Error_Message="Repository not found")
            return None
        sha = self.hub.refs[key].get(revision, revision)
        if sha not in self.hub.commits[key]:
            self._say(404, X_Error_Code="RevisionNotFound", X_Error_Message=f"Invalid rev id: {revision}")
            return None
        return sha, self.hub.commits[key][sha]

    def _info(self, _, kind, repo, revision="main"):
        if found := self._commit(kind, repo, revision or "main"):
            listed = [{"rfilename": name} for name in found[1]]
            self._say(200, {"_id": "0", "id": repo, "sha": found[0], "siblings": listed, "private": False, "tags": []})

    def _tree(self, _, kind, repo, revision):
        if found := self._commit(kind, repo, revision):
            self._say(
                200,
                [
                    {"type": "file", "path": name, "size": len(raw), "oid": hashlib.sha1(raw).hexdigest()}
                    for name, raw in found[1].items()
                ],
            )

    def _file(self, _, kind, repo, revision, name):
        if not (found := self._commit(kind, repo, revision)):
            return None
        if self.hub.closed.get(repo) == "gated":
            return self._say(403, X_Error_Code="GatedRepo", X_Error_Message="Access is restricted")
        if name not in found[1]:
            return self._say(404, X_Error_Code="EntryNotFound", X_Error_Message="Entry not found")
        etag = hashlib.sha1(found[1][name]).hexdigest()
        return self._say(200, found[1][name], ETag=f'"{etag}"', X_Repo_Commit=found[0])

    def _known(self):
        if self.headers.get("Authorization") == f"Bearer {TOKEN}":
            return True
        self._say(401, {"error": "Invalid username or password."})
        return False

    def _whoami(self, _):
        if self._known():
            self._say(200, {"type": "user", "name": "me", "orgs": []})

    def _create(self, body):
        if self._known():
            given = json.loads(body)
            repo = f"{given['organization']}/{given['name']}"
            if given["organization"] != "me":
                return self._say(403, X_Error_Message="You have no rights here")
            self.hub.created.append(given)
            known = ("model", repo) in self.hub.commits
            if not known:
                self.hub.commit(repo, {".gitattributes": b""})
            return self._say(409 if known else 200, {"url": f"http://{self.headers['Host']}/{repo}"})
        return None

    def _preupload(self, body, repo):
        if self._known():
            modes = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                    "shouldIgnore": False,
                }
                for file in json.loads(body)["files"]
            ]
            self._say(200, {"files": modes})

    def _batch(self, body, repo):
        if self._known():
            objects = json.loads(body)["objects"]
            for one in objects:
                one["actions"] = {"upload": {"href": f"http://{self.headers['Host']}/upload/{one['oid']}"}}
            self._say(200, {"transfer": "basic", "objects": objects})

    def _upload(self, body, oid):
        assert hashlib.sha256(body).hexdigest() == oid
        self.hub.uploaded[oid] = body
        self._say(200)

    def _new_commit(self, body, repo):
        if not self._known():
            return
        files = dict(self.hub.files(repo))
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.uploaded[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        sha = self.hub.commit(repo, files)
        url = f"http://{self.headers['Host']}/{repo}/commit/{sha}"
        self._say(200, {"commitUrl": url, "commitOid": sha, "success": True})

    REPO = r"(?P<repo>[\w.-]+/[\w.-]+)"
    KIND = r"/api/(?P<kind>models|datasets)/"
    ROUTES = (
        (KIND + REPO + r"(/revision/(?P<revision>.+))?", _info),
        (KIND + REPO + r"/tree/(?P<revision>.+)", _tree),
        (r"/((?P<kind>datasets)/)?" + REPO + r"/resolve/(?P<revision>[^/]+)/(?P<name>.+)", _file),
        (r"/api/whoami-v2", _whoami),
        (r"/api/repos/create", _create),
        (r"/api/models/" + REPO + r"/preupload/main", _preupload),
        (r"/" + REPO + r"\.git/info/lfs/objects/batch", _batch),
        (r"/upload/(?P<oid>\w+)", _upload),
        (r"/api/models/" + REPO + r"/commit/main", _new_commit),
    )
