"""Names that the documents set in backticks exist: in the sources, the configuration files or the command line."""

import re
from pathlib import Path

from pipelinerl_core.config import known_keys

ROOT = Path(__file__).parents[2]
GENERATED = {"metrics.md", "gym_tasks.md", "configuration.md", "cli.md", "schemas.md", "views.md"}
"""Pages that a command writes from the names themselves."""
FOLDERS = ("pipelinerl_core", "flows", "tasks", "pipelinerl", "tests", "benchmarks", "infra")
ENDINGS = {".py", ".toml", ".yaml", ".yml", ".sh", ".json", ".txt", ".env", ""}
ELSEWHERE = frozenset(
    {
        "sudo",
        "fuser",
        "pgrep",
        "mcp",
        "noac",
        "lookupcache",
        "pgpass",
        "PGPASSWORD",
        "PREFECT_SERVER_API_AUTH_STRING",
        "PREFECT_API_AUTH_STRING",
        "PREFECT_API_SSL_CERT_FILE",
        "MLFLOW_FLASK_SERVER_SECRET_KEY",
        "MLFLOW_TRACKING_SERVER_CERT_PATH",
        "PreemptParameters",
        "send_user_signal",
        "OPENAI_",
        "PREFECT_SERVER_",
        "HTTPS_PROXY",
        "S3FileSystem",
        "triton",
        "torchinductor_USER",
        "torch_",
        "sem",
        "test_list",
        "activate",
        "token_mask",
        "sequence_truncate",
        "sequence_mask",
    }
)
"""Programs, variables and names of other projects."""
EXAMPLES = frozenset({"MEAN", "SUITE", "funktion", "max_words", "num_"})
"""Placeholders, and names of a tutorial's own code."""
WORD = re.compile(r"[A-Za-z_]\w*")
PAGES = [
    page
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    if page.name not in GENERATED and page.parent.name not in ("adr", "results")  # these describe other versions too
]


def source_words():
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in ENDINGS]
    files += [ROOT / name for name in ("Makefile", "pyproject.toml", "prefect.yaml")]
    words = {word for path in files for part in path.relative_to(ROOT).parts for word in WORD.findall(part)}
    for path in files:
        if path.is_file() and path != Path(__file__) and "golden" not in path.parts:
            words.update(WORD.findall(path.read_text(errors="ignore")))
    return words


def spans(page):
    """The text in backticks, code blocks left out."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL))


def test_every_name_in_backticks_exists():
    known = source_words() | ELSEWHERE | EXAMPLES
    unknown = {
        f"{page.relative_to(ROOT)}: {word} (in `{span}`)"
        for page in PAGES
        for span in spans(page)
        for word in WORD.findall(span)
        if len(word) > 2 and word not in known
    }
    assert not unknown


def test_every_key_of_the_configuration_in_backticks_exists():
    keys, sections = known_keys(), {key.partition(".")[0] for key in known_keys() if "." in key}
    unknown = {
        f"{page.relative_to(ROOT)}: {key}"
        for page in PAGES
        for span in spans(page)
        for key in re.findall(rf"(?<![\w./-])(?:{'|'.join(sections)})\.[a-z_]+(?:\.\w+)*(?=[=\s,)]|$)", span)
        if not key.endswith((".py", ".md", ".json", ".toml", ".sh", ".parquet", ".safetensors"))
        if not any(key == known or key.startswith(f"{known}.") or known.startswith(f"{key}.") for known in keys)
        if not key.startswith("mixture.")
    }
    assert not unknown
