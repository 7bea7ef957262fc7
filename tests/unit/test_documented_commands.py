"""Every `pipelinerl` command in the documentation: the command, its options and the keys of its settings exist."""

import re
import shlex
import tomllib
from pathlib import Path

import pytest
from typer.main import get_command

from pipelinerl.flows.cli import app
from pipelinerl_core.config.load import known_keys

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
COMMANDS = get_command(app).commands
KEYS = set(known_keys())
SECTIONS = {key.partition(".")[0] for key in KEYS if "." in key}
PLACEHOLDERS = ("...", "KEY=VALUE", "[")


def commands_in(text: str) -> list[str]:
    """The command lines that begin with pipelinerl, in blocks and in code spans, without comments."""
    commands = []
    for block in re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        lines = re.sub(r"\s*\\\n\s*", " ", re.sub(r"\\ *(#.*)?$", r"\\", block, flags=re.MULTILINE)).splitlines()
        commands += [re.sub(r"^(\w+=\S+ )*", "", line.strip()) for line in lines]
    spans = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    commands += [" ".join(span.split()) for span in re.findall(r"`(pipelinerl [^`]+)`", spans)]
    return [line for line in commands if line.startswith("pipelinerl ")]


def words_of(line: str) -> list[str]:
    """The words of a command up to a pipe, a redirection or a comment."""
    words = shlex.split(line, comments=True)
    ends = [words.index(sign) for sign in ("|", ">", "&", "&&", ";") if sign in words]
    return words[1 : min(ends, default=len(words))]


def problems(line: str) -> list[str]:
    words = words_of(line)
    if not words or words[0].startswith("-") or words[0] == "COMMAND":
        return []
    command = COMMANDS.get(words[0])
    if command is None:
        return [f"no command {words[0]}"]
    options = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)} | {
        "--help"
    }
    complaints = [
        f"no option {word}" for word in words[1:] if word.startswith("-") and word.partition("=")[0] not in options
    ]
    settings = [part for word in words[1:] for part in word.split() if re.match(r"[a-z_]+\.[\w.]+=", part)]
    keys = [setting.partition("=")[0] for setting in settings]
    return complaints + [f"no key {key}" for key in keys if key.partition(".")[0] in SECTIONS and not is_key(key)]


def is_key(key: str) -> bool:
    """A key, or an entry of a key whose value is a table (prompts.options.gcd.max_numbers)."""
    if key.startswith("mixture."):  # mixture.NAME has a weight, a limit, and sections
        inner = key.split(".", 2)[2]
        return inner in ("weight", "max_tokens") or is_key(inner)
    return any(key == known or key.startswith(f"{known}.") for known in KEYS)


def test_the_check_finds_unknown_commands_options_and_keys():
    assert problems("pipelinerl trian quickstart") == ["no command trian"]
    assert problems("pipelinerl train quickstart --tinny | cat") == ["no option --tinny"]
    assert problems("pipelinerl train quickstart trainer.step=3 # trainer.stepps=4") == ["no key trainer.step"]
    assert commands_in("```\nA=b pipelinerl runs \\\n  --json\n```\nand `pipelinerl gc RUN`") == [
        "pipelinerl runs --json",
        "pipelinerl gc RUN",
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_commands_of_a_page_exist(page):
    problems_by_line = {line: problems(line) for line in commands_in(page.read_text())}
    assert {line: wrong for line, wrong in problems_by_line.items() if wrong} == {}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_settings_in_toml_blocks_exist(page):
    for block in re.findall(r"^```toml\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        for section, values in tomllib.loads(block).items():
            if isinstance(values, dict) and all(isinstance(value, dict) for value in values.values()):
                continue  # an arm of a comparison, whose tables are sections
            names = [f"{section}.{key}" for key in values] if isinstance(values, dict) else [section]
            assert [name for name in names if not is_key(name) and section != "mixture"] == [], page.name
