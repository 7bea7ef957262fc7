"""The example of docs/storage.md that prints the rows of a step as text."""

import re
from pathlib import Path

from transformers import AutoTokenizer

from pipelinerl import open_run
from pipelinerl_core.storage.object_store import open_store
from tests.synthetic_run import Shape, write_run

PAGE = Path(__file__).parents[3] / "docs" / "storage.md"


def test_the_documented_lines_print_prompt_completion_reward_and_versions(prepared_model, tmp_path, capsys):
    store = open_store(str(tmp_path / "r-1"))
    write_run(store, Shape(steps=6))
    (code,) = re.findall(r"```python\n(import pipelinerl\n[^`]*)```", PAGE.read_text())
    exec(code.replace("runs/RUN", str(tmp_path / "r-1")), {})
    rows = open_run(tmp_path / "r-1").rollouts(5, text=False).to_pylist()
    assert {row["step"] for row in rows} == {5}
    tokenizer = AutoTokenizer.from_pretrained(prepared_model)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(rows) == 16
    for line, row in zip(lines, rows, strict=True):
        assert line.startswith(f"{row['group_id']} {row['reward']} [{row['weight_spans'][0]['version']}")
        assert line.endswith(repr(tokenizer.decode(row["completion_token_ids"])))
