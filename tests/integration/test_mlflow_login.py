"""A run with MLflow behind a login that its URI has: the login reaches MLflow, and nothing that stays."""

import os
import subprocess
import sys
import threading
from base64 import b64encode
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from mlflow import MlflowClient

from tests.integration.pipeline import ROOT
from tests.integration.prefect_server import kill_tree
from tests.ports import free_port
from tests.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PASSWORD = "hunter2hunter2"
SMALL = ("trainer.steps=2", "trainer.groups_per_step=8", "engine.concurrency=32", "eval.num_prompts=0")


class Proxy(BaseHTTPRequestHandler):
    """Forwards to the MLflow server what has the login, and refuses the rest."""

    upstream = 0

    def handle_one(self) -> None:
        expected = f"Basic {b64encode(f'bob:{PASSWORD}'.encode()).decode()}"
        if self.headers["Authorization"] != expected:
            self.send_error(401)
            return
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        connection = HTTPConnection("127.0.0.1", self.upstream, timeout=60)
        headers = {name: self.headers[name] for name in ("Content-Type",) if self.headers[name]}
        connection.request(self.command, self.path, body, headers)
        answer = connection.getresponse()
        data = answer.read()
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.headers["Content-Type"] or "text/plain")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
        connection.close()

    do_GET = do_POST = do_PUT = do_PATCH = handle_one  # noqa: N815 (http.server's names)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


def is_up(port: int) -> bool:
    connection = HTTPConnection("127.0.0.1", port, timeout=2)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


@pytest.mark.campaign
def test_a_login_in_the_uri_is_used_and_kept_nowhere(tmp_path: Path, prepared_model: Path):
    Proxy.upstream = free_port()
    command = [str(Path(sys.executable).parent / "mlflow"), "server", "--port", str(Proxy.upstream), "--workers", "1"]
    command += [
        "--backend-store-uri",
        f"sqlite:///{tmp_path}/mlflow.db",
        "--artifacts-destination",
        f"{tmp_path}/files",
    ]
    quiet = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
    with (tmp_path / "mlflow.log").open("wb") as log:
        mlflow = subprocess.Popen(
            command, env={**os.environ, **quiet}, cwd=tmp_path, stdout=log, stderr=log, start_new_session=True
        )
    proxy = ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
    thread = threading.Thread(target=proxy.serve_forever)
    thread.start()
    address = f"127.0.0.1:{proxy.server_address[1]}"
    try:
        wait_for(lambda: is_up(Proxy.upstream), f"MLflow, {tmp_path}/mlflow.log", 300, process=mlflow)
        command = [sys.executable, "-m", "pipelinerl.flows.cli", "train", "quickstart", *SMALL]
        command += [f"tracking.mlflow_uri=http://bob:{PASSWORD}@{address}", "--root", str(tmp_path / "runs")]
        own = {
            name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_TRACKING_"))
        }
        done = subprocess.run(command, env=own, cwd=ROOT, capture_output=True, text=True, timeout=400, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        client = MlflowClient(tracking_uri=f"http://127.0.0.1:{Proxy.upstream}")
        (run,) = client.search_runs([client.get_experiment_by_name("pipelinerl").experiment_id])
        assert run.info.status == "FINISHED"
        assert "reward/mean" in run.data.metrics
        assert run.data.params["tracking.mlflow_uri"] == f"http://{address}"
        assert PASSWORD not in done.stdout + done.stderr
        files = [path for path in tmp_path.rglob("*") if path.is_file()]
        assert {"run.json", "report.json", "prefect.db", "mlflow.db", "trainer.log"} <= {path.name for path in files}
        assert [path for path in files if PASSWORD.encode() in path.read_bytes()] == []
    finally:
        proxy.shutdown()
        thread.join()
        proxy.server_close()
        kill_tree(mlflow.pid)
        mlflow.wait(timeout=60)
