"""The training and held-out prompts of a run as MLflow datasets: a name, and a digest of the problems.

The digest does not include the order of the problems, which depends on the seed, so runs with different seeds have
the same dataset.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pipelinerl_core import __version__
from pipelinerl_core.config import RunConfig
from pipelinerl_core.config.prompts import PromptsSection

_DIGEST_CHARS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetNote:
    """One dataset of a run."""

    name: str
    digest: str
    """8 hex digits over the settings and files that determine the problems."""
    context: Literal["train", "eval"]
    source_type: str
    """local, hugging_face, or pipelinerl for generated problems."""
    source: Mapping[str, Any]
    columns: tuple[str, ...]
    num_prompts: int | None = None
    """None: endless, or unknown until the file is read."""


def run_datasets(config: RunConfig) -> list[DatasetNote]:
    """The dataset of the training prompts, and of the held-out prompts if the run evaluates; of a mixture for each
    part, with the name of the part before the name of the dataset."""
    return [
        replace(note, name=f"{name}-{note.name}" if name else note.name)
        for name, part in config.parts.items()
        for note in _datasets(part)
    ]


def _datasets(config: RunConfig) -> list[DatasetNote]:
    rendering = set(PromptsSection.model_fields)  # the same problems, written otherwise
    prompts = config.prompts.model_dump(mode="json", exclude=rendering)
    prompts = {key: value for key, value in prompts.items() if value != {}}  # options of reasoning-gym, if any
    kind = config.prompts.kind
    path = str(prompts.get("path", ""))
    name = Path(path).stem if path else kind
    source_type = {"file": "local", "huggingface": "hugging_face"}.get(kind, "pipelinerl")
    source = {"uri": path, **prompts} if kind == "file" else prompts
    columns = (prompts.get("prompt_column", "prompt"), prompts.get("answer_column", "answer"))
    content = _content(Path(path)) if path else __version__
    own = str(prompts.get("held_out_path", ""))
    held_out_content = content + _content(Path(own)) if own else content
    train = DatasetNote(
        name=name,
        digest=_digest([prompts, content]),
        context="train",
        source_type=source_type,
        source=source,
        columns=columns,
    )
    if config.eval.num_prompts == 0:
        return [train]
    held_out = replace(
        train,
        name=f"{name}-held-out",
        digest=_digest([prompts, held_out_content, config.eval.num_prompts]),
        context="eval",
        num_prompts=None if path else config.eval.num_prompts,  # a table may have fewer
    )
    return [train, held_out]


def _content(path: Path) -> str:
    """Content of a local path for the digest: hash of a file, names and sizes in a directory."""
    if path.is_file():
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else []
    return json.dumps([[str(file.relative_to(path)), file.stat().st_size] for file in files])


def _digest(values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:_DIGEST_CHARS]
