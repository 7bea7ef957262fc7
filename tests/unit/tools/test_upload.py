"""Upload to the hub. A server on loopback answers as the hub does, which cannot be reached from here."""

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from pipelinerl_core.errors import ConfigError
from pipelinerl_core.tools.upload import check_login

LOGIN = "hf_" + "x" * 30
PROGRAM = """
import sys
from pathlib import Path
from pipelinerl_core.errors import PipelineRLError
from pipelinerl_core.tools.upload import check_login, upload
try:
    check_login("me/model")
    print(upload(Path(sys.argv[1]), "me/model"))
except PipelineRLError as error:
    print(error)
"""


class Hub(BaseHTTPRequestHandler):
    """Creates repositories and takes commits; weights go by the LFS protocol."""

    def answer(self):
        body = self.rfile.read(int(self.headers["content-length"] or 0))
        self.server.requests.append((self.path, body))
        if self.headers["authorization"] != f"Bearer {LOGIN}" and not self.path.startswith("/put/"):
            self.send_error(401)
            return
        answer = {}
        if self.path.startswith("/api/whoami"):
            answer = {"name": "me", "type": "user", "auth": {"type": "access_token"}}
        elif self.path == "/api/repos/create":
            answer = {"url": f"{self.server.url}/me/model"}
        elif "/preupload/" in self.path:
            names = [file["path"] for file in json.loads(body)["files"]]
            modes = {name: "lfs" if name.endswith(".safetensors") else "regular" for name in names}
            answer = {"files": [{"path": p, "uploadMode": m, "shouldIgnore": False} for p, m in modes.items()]}
        elif self.path.endswith("info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            for entry in objects:
                entry["actions"] = {"upload": {"href": f"{self.server.url}/put/{entry['oid']}"}}
            answer = {"transfer": "basic", "objects": objects}
        elif "/commit/" in self.path:
            answer = {"commitUrl": f"{self.server.url}/me/model/commit/1", "commitOid": "1"}
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = do_PUT = answer

    def log_message(self, *arguments):
        pass


@pytest.fixture
def hub():
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        server.url = f"http://127.0.0.1:{server.server_address[1]}"
        server.requests = []
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join(10)


def run_upload(hub, directory, login):
    """What the program prints; a child process, because the library reads its variables when it is imported."""
    own = {"HF_ENDPOINT": hub.url, "HF_TOKEN": login, "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(directory.parent)}
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, directory],
        timeout=90,
        env={**os.environ, **own},
        capture_output=True,
        text=True,
    )
    return ended.stdout.strip() or ended.stderr


def test_a_directory_is_uploaded_to_a_private_repository(hub, tmp_path):
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(b"weights")
    assert run_upload(hub, directory, LOGIN) == f"{hub.url}/me/model"
    bodies = {path.split("?")[0]: body for path, body in hub.requests}
    assert json.loads(bodies["/api/repos/create"])["visibility"] == "private"
    assert b"weights" in [body for path, body in hub.requests if path.startswith("/put/")]
    committed = [json.loads(line) for line in bodies["/api/models/me/model/commit/main"].splitlines()]
    assert {line["value"].get("path") for line in committed} == {None, "config.json", "model.safetensors"}


def test_a_login_that_the_hub_does_not_know_is_refused_before_the_export(hub, tmp_path):
    answer = run_upload(hub, tmp_path, LOGIN[:-1])
    assert answer.startswith("--push me/model: ")
    assert answer.endswith("Set HF_TOKEN, or run `hf auth login`")
    assert "/api/repos/create" not in [path for path, _ in hub.requests]


@pytest.mark.parametrize("name", ["model", "me/../model", "a/b/c", ""])
def test_a_name_that_is_no_repository_is_refused(name):
    with pytest.raises(ConfigError, match=f"--push {name}: "):
        check_login(name)
