"""A user's reward function: checked before a run, called in scoring processes, stored with the run."""

import asyncio
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import numpy as np
import pytest

from pipelinerl_core.errors import ConfigError, RewardError
from pipelinerl_core.models.resolve import load_config
from pipelinerl_core.rewards.pool import build_scorer
from pipelinerl_core.run.user_code import local_code
from pipelinerl_core.sandbox import isolation
from pipelinerl_core.supervision.checks import check_reward
from pipelinerl_core.types import Completion, FinishReason, Prompt
from tests.unit.prompts.test_records import ODD

pytestmark = pytest.mark.slow

CODE = """
import json

def score(text, prompt, answer, token_ids, finish_reason, **row):
    correct = float(json.loads(text)["answer"] == answer)  # raises for other texts
    return {"correct": correct, "tokens": len(token_ids), "stopped": finish_reason == "stop",
            "easy": row["level"] == 1}

def parts(text): return {"correct": 1}
def same(text, value, exact): return float(json.dumps(value) == exact)
def none(text): pass
def words(text): return text
def unknown(text, answr): return 1.0
def dial(text):
    import socket
    socket.create_connection(("127.0.0.1", 9), timeout=1)
def secret(text):
    import os
    return float("PIPELINERL_TOKEN" in os.environ)
def read(text, path): return len(open(path).read())
def opens(text): return len(open("rows.jsonl").read())
def slow(text):
    while True: pass
"""


@pytest.fixture
def configured(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(CODE)
    rows = [{"prompt": f"{number}+1=", "answer": str(number + 1), "level": number % 2} for number in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def configure(function, *overrides):
        data = ("prompts.kind=file", "prompts.path=rows.jsonl", "reward.timeout_seconds=2")
        return load_config("quickstart", [*data, f"reward.function={function}", *overrides])

    return configure


def scores(config, *texts, task=None):
    prompt = Prompt(prompt_id="0", source="s", env=config.reward.function, text="1+1=",
                    task=task or {"answer": "2", "level": 1})  # fmt: skip
    completion = Completion(
        token_ids=np.array([5, 6, 7]), rollout_logprobs=np.zeros(3), weight_spans=(), finish_reason=FinishReason.STOP
    )

    async def main():
        scorer = build_scorer(config, code=local_code(config))
        try:
            async with asyncio.timeout(60):
                calls = (scorer.score(prompt, text, completion) for text in texts)
                return await asyncio.gather(*calls, return_exceptions=True)
        finally:
            await scorer.close()

    return asyncio.run(main())


def test_rewards_components_and_exceptions_come_from_a_sealed_process(configured):
    config = configured("mine.py:score", "reward.weights.tokens=0.1", "reward.weights.easy=0")
    right, wrong = scores(config, '{"answer": "2"}', "no JSON")
    assert right == pytest.approx(1.0 + 0.3 + 1.0)
    assert dict(right.components) == {"correct": 1.0, "tokens": 3.0, "stopped": 1.0, "easy": 1.0}
    assert isinstance(wrong, RewardError)
    assert str(wrong).startswith("verifier mine.py:score: JSONDecodeError: ")
    assert str(wrong).endswith("(mine.py:5)")


def test_values_of_a_row_reach_the_function_as_they_are_in_the_file(configured):
    exact = json.dumps(ODD)
    assert scores(configured("mine.py:same"), "text", task={"value": json.loads(exact), "exact": exact}) == [1.0]


def test_a_function_reaches_neither_network_nor_files_nor_the_token(configured, tmp_path, monkeypatch):
    monkeypatch.setenv("PIPELINERL_TOKEN", "hidden")
    assert scores(configured("mine.py:secret"), "") == [0.0]
    for function, task in (("mine.py:dial", None), ("mine.py:read", {"path": str(tmp_path / "mine.py")})):
        (refused,) = scores(configured(function), "", task=task)
        assert "PermissionError" in str(refused)


def test_a_function_over_its_deadline_gives_reward_0(configured):
    assert scores(configured("mine.py:slow"), "") == [0.0]


def test_a_sound_function_passes_the_check_and_its_exceptions_are_warnings(configured):
    other, empty = check_reward(configured("mine.py:score"))
    assert "with the completion '' raised JSONDecodeError: " in empty
    assert "(mine.py:5)" in other
    assert "(mine.py:5)" in empty
    assert check_reward(configured("mine.py:secret")) == []


def test_a_file_that_imports_pandas_can_be_isolated(configured, tmp_path):
    (tmp_path / "frames.py").write_text("import pandas\ndef score(text): return pandas.Series([1, 2]).sum()\n")
    assert scores(configured("frames.py:score"), "") == [3.0]


def test_what_a_function_imports_is_imported_before_the_isolation(configured, tmp_path):
    (tmp_path / "inner.py").write_text(
        "def score(text):\n    import torch\n    from xml.dom import minidom\n"
        "    try:\n        import nowhere\n    except ImportError:\n        pass\n"
        "    return float(torch.ones(3).sum()) + (minidom is None)\n"
    )
    assert check_reward(configured("inner.py:score")) == []


@pytest.mark.skipif(bool(isolation.missing()), reason=f"this host has no {' and no '.join(isolation.missing())}")
def test_a_file_that_starts_a_thread_is_refused_with_the_name_of_the_thread(configured, tmp_path):
    code = "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    (tmp_path / "threads.py").write_text(code + "def score(text): return 1\n")
    with pytest.raises(ConfigError, match=r"has started threads \(\S+\), .* set reward\.isolation=none"):
        check_reward(configured("threads.py:score"))
    assert check_reward(configured("threads.py:score", "reward.isolation=none")) == []


@pytest.mark.skipif(bool(isolation.missing()), reason=f"this host has no {' and no '.join(isolation.missing())}")
def test_a_function_that_reads_a_file_is_told_where_to_read(configured):
    warning, _ = check_reward(configured("mine.py:opens"))
    assert "Permission denied: 'rows.jsonl'" in warning
    assert warning.endswith("Read files outside of the function, where the file is loaded")


def test_code_that_exits_is_told_with_its_line(configured, tmp_path):
    (tmp_path / "exits.py").write_text("import sys\ndef score(text): return 1.0 if text else sys.exit(3)\n")
    error, reward = scores(configured("exits.py:score"), "", "right")
    assert (str(error), reward) == ("verifier exits.py:score: SystemExit: 3 (exits.py:2)", 1.0)
    (tmp_path / "script.py").write_text("import argparse\nargparse.ArgumentParser().parse_args(['--all'])\n")
    with pytest.raises(ConfigError, match=r"^reward\.function=script\.py:score: SystemExit: 2 \(script\.py:2\)$"):
        check_reward(configured("script.py:score"))


REFUSED = {
    "import threading\n    thread = threading.Thread(target=print)\n    thread.start()": "may start no threads",
    "import subprocess\n    subprocess.run(['true'])": "may start no processes",
    "import urllib.request\n    urllib.request.urlopen('http://127.0.0.1:9/')": "set reward.network=true",
    "open('/tmp/own.txt', 'w')": "may write no files",
    "import tempfile\n    tempfile.TemporaryFile()": "may write no files",
    "import os\n    os.environ['NOWHERE']": "name it in reward.environment",
}


@pytest.mark.skipif(bool(isolation.missing()), reason=f"this host has no {' and no '.join(isolation.missing())}")
@pytest.mark.parametrize("code", REFUSED)
def test_a_call_that_the_isolation_refuses_is_told_what_to_do(configured, tmp_path, code):
    (tmp_path / "refused.py").write_text(f"def score(text):\n    {code}\n    return 1.0\n")
    warning, _ = check_reward(configured("refused.py:score"))
    assert REFUSED[code] in warning.partition("are not trained")[2]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("mine.py:none", "none returned None"),
        ("mine.py:words", "words returned str '.*', not a number"),
        ("mine.py:unknown", "has the parameter answr, .* Available: answer, finish_reason, level, prompt, text, tok"),
        ("mine.py:missing", "no function missing there"),
        ("nofile.py:score", "no such file in"),
        ("no_module:score", "no module named no_module. Install the module on every host"),
        ("mine.py:parts", r"reward\.weights\.corect: parts returned no such component"),
    ],
)
def test_an_unusable_function_is_refused_in_one_line(configured, function, message):
    overrides = ["reward.weights.corect=1"] if function == "mine.py:parts" else []
    with pytest.raises(ConfigError, match=message) as refused:
        check_reward(configured(function, *overrides))
    assert str(refused.value).startswith(f"reward.function={function}: ")
    assert "\n" not in str(refused.value)


class Judge(BaseHTTPRequestHandler):
    """Grades the reply "two" with 7 if the request has the key."""

    def do_POST(self):
        question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert question["model"] == "judge-1"
        is_known = self.headers["Authorization"] == "Bearer key"
        content = "The grade is 7." if is_known and "Reply: two" in question["messages"][0]["content"] else "None."
        body = json.dumps({"choices": [{"message": {"content": content}}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def judge(tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text()
    (tmp_path / "judge.py").write_text(page.split("```python\n# judge.py\n")[1].split("```")[0])
    monkeypatch.setenv("JUDGE_MODEL", "judge-1")
    monkeypatch.setenv("JUDGE_KEY", "key")
    with ThreadingHTTPServer(("127.0.0.1", 0), Judge) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setenv("JUDGE_URL", f"http://127.0.0.1:{server.server_port}")
        yield server
        server.shutdown()
        thread.join()


JUDGED = ("reward.network=true", 'reward.environment=["JUDGE_URL", "JUDGE_MODEL", "JUDGE_KEY"]')


def test_the_judge_of_the_documentation_scores_over_the_network(configured, judge, tmp_path, monkeypatch):
    assert scores(configured("judge.py:score", *JUDGED), "two", "three") == [0.7, 0.0]
    (refused,) = scores(configured("judge.py:score", JUDGED[1]), "two")
    assert "Operation not permitted" in str(refused)
    (refused,) = scores(configured("judge.py:score", JUDGED[0]), "two")
    assert "KeyError: 'JUDGE_MODEL' (judge.py:" in str(refused)
    monkeypatch.setenv("JUDGE_KEY", "a-long-secret-key")
    (tmp_path / "tells.py").write_text("import os\ndef score(): raise ValueError(os.environ['JUDGE_KEY'])\n")
    (refused,) = scores(configured("tells.py:score", *JUDGED), "")
    assert str(refused) == "verifier tells.py:score: ValueError: $JUDGE_KEY (tells.py:2)"
    monkeypatch.delenv("JUDGE_KEY")
    with pytest.raises(ConfigError, match="JUDGE_KEY is not set in the environment"):
        check_reward(configured("judge.py:score", *JUDGED))


NETWORKED = """
import asyncio, os, socket, threading

async def dials(text, port):
    reader, writer = await asyncio.open_connection("localhost", port)  # looks the name up on a thread
    writer.write(b"GET / HTTP/1.0\\r\\n\\r\\n")
    answer = await reader.readline()
    writer.close()
    return b"HTTP" in answer

def attempt(call):
    try:
        call()
    except OSError:
        return 0
    return 1

def escapes(text, path):
    return {
        "read": attempt(lambda: open(path)),
        "write": attempt(lambda: open(path, "w")),
        "unix": attempt(lambda: socket.socket(socket.AF_UNIX)),
        "listen": attempt(lambda: socket.create_server(("127.0.0.1", 0))),
        "fork": attempt(os.fork),
        "run": attempt(lambda: os.execv("/bin/true", ["true"])),
        "kill": attempt(lambda: os.kill(os.getppid(), 0)),
    }
"""


@pytest.mark.skipif(bool(isolation.missing()), reason=f"this host has no {' and no '.join(isolation.missing())}")
def test_network_opens_connections_and_nothing_else(configured, judge, tmp_path):
    (tmp_path / "networked.py").write_text(NETWORKED)
    config = configured("networked.py:dials", "reward.network=true")
    assert scores(config, "", task={"port": judge.server_port}) == [1.0]
    config = configured("networked.py:escapes", "reward.network=true")
    (score,) = scores(config, "", task={"path": str(tmp_path / "mine.py")})
    assert dict(score.components) == dict.fromkeys(("read", "write", "unix", "listen", "fork", "run", "kill"), 0.0)
