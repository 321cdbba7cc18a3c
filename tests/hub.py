"""Stand-ins of the Hugging Face Hub on loopback: one that is pushed to, and one that has a dataset."""

import base64
import contextlib
import hashlib
import json
import re
from http.server import ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

from huggingface_hub import constants

from tests.loopback import Handler, serving

TOKEN, READ_ONLY = "hf_canaryTokenOfNobody", "hf_canaryTokenThatOnlyReads"


class PushHub(ThreadingHTTPServer):
    """What `huggingface_hub` asks of the Hub to push files: whose token, a new repository, may it write, a commit.

    Attributes:
        private: of each repository, whether it is; others' repositories are of "somebody".
        files: content by path, for each repository. lfs: uploaded content by sha256.
        fails: path pattern -> status that requests for it are answered with.
    """

    def __init__(self):
        self.private = {"somebody/arm": False}
        self.files, self.lfs, self.fails = {}, {}, {}
        super().__init__(("127.0.0.1", 0), PushRequest)

    @property
    def endpoint(self):
        return f"http://127.0.0.1:{self.server_address[1]}"


class PushRequest(Handler):
    def do_GET(self):
        path = urlsplit(self.path).path
        sent = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        for pattern, status in self.server.fails.items():
            if re.search(pattern, path):
                return self.answer(status)
        if upload := re.fullmatch(r"/upload/(\w+)", path):
            self.server.lfs[upload[1]] = sent
            return self.answer(200)
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token not in (TOKEN, READ_ONLY):
            return self.json({"error": "Invalid user token."}, 401)
        if path == "/api/whoami-v2":
            return self.json({"name": "me", "orgs": []})
        if path == "/api/validate-yaml":
            return self.json({"errors": [], "warnings": []})
        if path == "/api/repos/create":
            asked = json.loads(sent)
            return self.create(f"{asked['organization'] or 'me'}/{asked['name']}", asked, token)
        found = re.fullmatch(r"/(?:api/models/)?([^/]+/[^/]+?)(?:\.git)?(?:/(.+))?", path)
        repo_id, what = found.groups()
        if repo_id not in self.server.private:
            return self.answer(404, headers={"X-Error-Code": "RepoNotFound"})
        if what is None:
            return self.json({"id": repo_id, "sha": "a" * 40, "private": self.server.private[repo_id], "siblings": []})
        if token == READ_ONLY or not repo_id.startswith("me/"):
            return self.json({"error": "Forbidden"}, 403)
        if what == "auth-check/write":
            return self.json({})
        if what == "preupload/main":
            modes = [
                {"path": f["path"], "uploadMode": "lfs" if f["path"].endswith(".safetensors") else "regular"}
                for f in json.loads(sent)["files"]
            ]
            return self.json({"files": [{**mode, "shouldIgnore": False} for mode in modes]})
        if what == "info/lfs/objects/batch":
            objects = [
                {**o, "actions": {"upload": {"href": f"{self.server.endpoint}/upload/{o['oid']}"}}}
                for o in json.loads(sent)["objects"]
            ]
            return self.json({"transfer": "basic", "objects": objects})
        assert what == "commit/main", path
        files = self.server.files.setdefault(repo_id, {})
        for line in map(json.loads, sent.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.server.lfs[value["oid"]]
        commit = "c" * 40
        url = f"{self.server.endpoint}/{repo_id}/commit/{commit}"
        return self.json({"commitUrl": url, "commitOid": commit, "success": True})

    do_POST = do_PUT = do_GET

    def create(self, repo_id, asked, token):
        if token == READ_ONLY or not repo_id.startswith("me/"):
            return self.json({"error": "Forbidden"}, 403)
        if repo_id in self.server.private:
            return self.json({"error": "exists", "url": f"{self.server.endpoint}/{repo_id}"}, 409)
        self.server.private[repo_id] = asked.get("visibility") == "private"
        return self.json({"url": f"{self.server.endpoint}/{repo_id}"})

    def json(self, value, status=200):
        self.answer(status, json.dumps(value).encode(), {"Content-Type": "application/json"})


class DatasetHub(ThreadingHTTPServer):
    """What `huggingface_hub` asks of the Hub for one gated dataset: its commits, its files, which token may read it.

    Attributes:
        commits: commit hash by branch or tag. asked: "METHOD path" of each request that was let in.
        refusal: status and code that every request is answered with.
    """

    def __init__(self, repo_id, folder, commits):
        self.repo_id, self.folder, self.commits = repo_id, folder, commits
        self.asked, self.refusal = [], None
        super().__init__(("127.0.0.1", 0), DatasetRequest)

    def downloads(self):
        """The files whose content was asked for, as often as it was."""
        gets = [request.partition("/resolve/")[2] for request in self.asked if request.startswith("GET ")]
        return [request.partition("/")[2] for request in gets if request]


class DatasetRequest(Handler):
    def do_GET(self):
        hub, path = self.server, unquote(urlsplit(self.path).path)
        if hub.refusal:
            return self.refuse(*hub.refusal)
        of_repository = re.fullmatch(
            rf"/(?:api/)?datasets/{hub.repo_id}(?:/(revision|tree|resolve)/([^/]+)(?:/(.+))?)?", path
        )
        if not of_repository:
            return self.refuse(401, "RepoNotFound")
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.refuse(401, "GatedRepo")
        hub.asked.append(f"{self.command} {path}")
        what, revision, file = of_repository.groups()
        commit = hub.commits.get(revision or "main", revision)
        if commit not in hub.commits.values():
            return self.refuse(404, "RevisionNotFound")
        files = sorted(f.relative_to(hub.folder).as_posix() for f in hub.folder.rglob("*") if f.is_file())
        if what == "resolve":
            if file not in files:
                return self.refuse(404, "EntryNotFound")
            data = (hub.folder / file).read_bytes()
            return self.answer(200, data, {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha256(data).hexdigest()}"'})
        if what == "tree":
            sizes = [{"type": "file", "path": f, "size": (hub.folder / f).stat().st_size, "oid": f} for f in files]
            return self.answer(200, json.dumps(sizes).encode())
        info = {"id": hub.repo_id, "sha": commit, "private": False, "siblings": [{"rfilename": f} for f in files]}
        return self.answer(200, json.dumps(info).encode())

    def refuse(self, status, code):
        self.answer(status, headers={"X-Error-Code": code})


@contextlib.contextmanager
def dataset_hub(monkeypatch, folder, cache):
    """Serve a dataset as `somebody/arm`, and cache what is downloaded of it in a folder."""
    server = DatasetHub("somebody/arm", folder, {"main": "a" * 40, "v3.0": "b" * 40})
    with serving(server) as endpoint:
        # The client's constants are read at import.
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        template = f"{endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr("lerobot.utils.constants.HF_LEROBOT_HUB_CACHE", cache)
        yield server
