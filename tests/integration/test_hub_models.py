"""Models of the hub by name, from a local server that answers like the hub."""

import hashlib
import json
import os
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from pipelinerl_core.errors import ConfigError
from pipelinerl_core.models.hub import is_hub_model
from pipelinerl_core.models.resolve import load_config
from pipelinerl_core.supervision import checks

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": json.dumps({"max_position_embeddings": 512, "vocab_size": 8}).encode(),
    "model.safetensors": b"weights",
    "pytorch_model.bin": b"weights in another format",
    "tokenizer.json": b"{}",
}
PINNED = """
from pipelinerl_core.models.resolve import load_config
from pipelinerl_core.models.hub import pinned
print(pinned(load_config("quickstart", ["model.path=org/tiny"])).model.path)
"""


class Hub(BaseHTTPRequestHandler):
    """The routes of the hub that a download uses, for the model org/tiny with the branch main."""

    requested: list[str]

    def do_GET(self):
        path = self.path.partition("?")[0]
        self.requested.append(path)
        if path == "/api/models/org/tiny/revision/main":
            names = [{"rfilename": name} for name in FILES]
            self.answer(json.dumps({"id": "org/tiny", "sha": COMMIT, "siblings": names}).encode())
        elif path == f"/api/models/org/tiny/tree/{COMMIT}":
            entries = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in FILES.items()
            ]
            self.answer(json.dumps(entries).encode())
        elif path.startswith(f"/org/tiny/resolve/{COMMIT}/"):
            self.answer(FILES[path.rpartition("/")[2]])
        else:
            self.answer(b"{}", status=404)

    do_HEAD = do_GET

    def answer(self, data, status=200):
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        if status == 404:
            self.send_header("X-Error-Code", "RepoNotFound")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The server; child processes use the server, and a cache of their own."""
    Hub.requested = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
        for name in ("HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        yield server
        server.shutdown()
        thread.join()


def child(*arguments, **environment):
    command, own = [sys.executable, *arguments], {**os.environ, **environment}
    return subprocess.run(command, env=own, capture_output=True, text=True, timeout=120, check=False)


def test_a_model_is_downloaded_once_and_its_commit_is_recorded(hub):
    before = child("-c", PINNED).stdout.strip()
    checks.download("org/tiny")
    directory = Path(child("-m", "pipelinerl_core.models.hub", "org/tiny").stdout.strip())
    assert before == "org/tiny"
    assert {path.name for path in directory.iterdir()} == set(FILES) - {"pytorch_model.bin"}
    assert child("-c", PINNED).stdout.strip() == f"org/tiny@{COMMIT}"
    count = len(Hub.requested)
    again = child("-m", "pipelinerl_core.tools.prepare", "--model", f"org/tiny@{COMMIT}", "--json")
    assert json.loads(again.stdout)["path"] == str(directory)
    assert len(Hub.requested) == count, "a commit in the cache needs no request"
    offline = child("-m", "pipelinerl_core.models.hub", "org/tiny", HF_HUB_OFFLINE="1")
    assert offline.stdout.strip() == str(directory)


def test_a_model_that_does_not_exist_is_one_line(hub):
    with pytest.raises(ConfigError, match=r"model\.path=org/none: .* hub failed \(RepositoryNotFound") as caught:
        checks.check_model(load_config("quickstart", ["model.path=org/none"]))
    assert "\n" not in str(caught.value)


def test_without_a_network_the_error_is_one_line_that_names_the_keys_to_set(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nothing listens there
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    message = r"model\.path=org/tiny@v1: no such directory .* hub failed .* Set model\.path to a directory, HF_HOME"
    with pytest.raises(ConfigError, match=message) as caught:
        checks.check_model(load_config("quickstart", ["model.path=org/tiny@v1"]))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("path", ["builtin:sums", "/models/mine", "./mine", "~/mine", "mine", "a/b/c", "org/", "@v1"])
def test_paths_are_not_names_of_the_hub(path):
    assert not is_hub_model(path)


def test_a_directory_with_the_form_of_a_name_is_a_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert is_hub_model("org/tiny")
    (tmp_path / "org" / "tiny").mkdir(parents=True)
    assert not is_hub_model("org/tiny")
