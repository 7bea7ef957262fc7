"""What a run learns from and is measured on, as MLflow's datasets: a name, and a digest of the problems.

The order in which a run sees them depends on its seed and is no part of the digest: runs with several seeds have the
same dataset.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pipelinerl_core import __version__
from pipelinerl_core.config import RunConfig

_DIGEST_CHARS = 8
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetNote:
    """One dataset of a run."""

    name: str
    digest: str
    """Hex digits over what decides its problems."""
    context: Literal["train", "eval"]
    source_type: str
    """local, hugging_face, or pipelinerl for problems that are generated."""
    source: Mapping[str, Any]
    columns: tuple[str, ...]
    num_prompts: int | None = None
    """None: endless, or not known before it is read."""


def run_datasets(config: RunConfig) -> list[DatasetNote]:
    """The prompts that are trained on, and those held out if any are evaluated."""
    prompts = config.prompts.model_dump(mode="json")
    kind = config.prompts.kind
    path = str(prompts.get("path", ""))
    name = Path(path).stem if path else kind
    source_type = {"file": "local", "huggingface": "hugging_face"}.get(kind, "pipelinerl")
    source = {"uri": path, **prompts} if kind == "file" else prompts
    columns = (prompts.get("prompt_column", "prompt"), prompts.get("answer_column", "answer"))
    content = _content(Path(path)) if path else __version__
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
    held_out = DatasetNote(
        name=f"{name}-held-out",
        digest=_digest([prompts, content, config.eval.num_prompts]),
        context="eval",
        source_type=source_type,
        source=source,
        columns=columns,
        num_prompts=config.eval.num_prompts,
    )
    return [train, held_out]


def _content(path: Path) -> str:
    """What lies at a local path: of a file its bytes, of a directory names and sizes; empty for a name on a hub."""
    if path.is_file():
        digest = hashlib.sha256()
        with path.open("rb") as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                digest.update(chunk)
        return digest.hexdigest()
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else []
    return json.dumps([[str(file.relative_to(path)), file.stat().st_size] for file in files])


def _digest(values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:_DIGEST_CHARS]
