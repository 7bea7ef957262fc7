"""`train --tiny` with each architecture of transformers: the table of docs/models.md."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.families import FAMILIES, entries_of
from tests.integration.pipeline import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.campaign, pytest.mark.timeout(3600)]

PAGE = ROOT / "docs" / "models.md"
TABLE = re.compile(r"(?<=\|--\|--\|\n)(\|.*\n)+")


def test_the_table_is_what_train_tiny_does(tmp_path):
    """PIPELINERL_UPDATE_TABLES=1 writes the table instead."""
    families: dict[str, list[str]] = {}  # outcome -> names
    for family in sorted(FAMILIES):
        families.setdefault(outcome(family, tmp_path), []).append(f"`{family}`")
    table = "".join(f"| {', '.join(names)} | {reason} |\n" for reason, names in families.items())
    page = PAGE.read_text(encoding="utf-8")
    if os.environ.get("PIPELINERL_UPDATE_TABLES"):
        PAGE.write_text(TABLE.sub(lambda _: table, page), encoding="utf-8")
    else:
        assert TABLE.search(page)[0].splitlines() == table.splitlines()


def outcome(family: str, directory: Path) -> str:
    """ "runs", or why the family is refused before the start."""
    model = directory / family
    model.mkdir()
    (model / "config.json").write_text(json.dumps(entries_of(family)))
    command = [sys.executable, "-m", "pipelinerl.flows.cli", "train", "quickstart", "--tiny", f"model.path={model}"]
    ended = subprocess.run(
        [*command, "--root", str(directory / "runs"), "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if ended.returncode == 0:
        assert json.loads(ended.stdout)["steps"] == 3
        return "runs"
    assert ended.returncode == 2, ended.stderr
    reason = re.search(r"cannot be (?:trained|sampled|loaded): .*(?=\. docs/models)|--tiny cannot.*", ended.stderr)
    assert reason, ended.stderr
    text = re.sub(r"\w+ForCausalLM(: )?", lambda name: "" if name[1] else "the model", reason[0])
    return re.sub(r"differ by \S+ from", "differ from", text)  # the number depends on the processor
