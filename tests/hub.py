"""A stand-in of the Hugging Face Hub that is pushed to, on loopback."""

import base64
import json
import re
from http.server import ThreadingHTTPServer
from urllib.parse import urlsplit

from tests.loopback import Handler

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
