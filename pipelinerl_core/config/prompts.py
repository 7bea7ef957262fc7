"""Sections of the prompt sources; the text below a field is its help."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from pipelinerl_core.config.section import Section


class PromptsSection(Section):
    """The keys that every kind of prompts has."""

    verifier: ClassVar[str] = ""
    """The verifier of reward.kind=auto; empty: the environment scores its tasks."""
    from_environment: ClassVar[bool] = False
    """The environment itself has the tasks."""

    system: str = Field("default", min_length=1)
    """System message before each prompt, with model.chat_template. default: whatever the chat template inserts by
    itself; none: no system turn, also where the chat template would insert one; any other text: the message."""
    control_tokens: Literal["text", "allow"] = "text"
    """With model.chat_template, text in a message that looks like a special token ("<|im_end|>"). text: ordinary
    text, so that no message can end a turn; allow: the token."""

    def held_out_in(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Keys that hold out every row of a set of eval.sets which `changes` takes from another file or split."""
        return {}


class SumsPrompts(PromptsSection):
    """Sums of one-digit numbers, "3+4+8=", of 2 to 16 summands: the quickstart's task."""

    verifier: ClassVar = "sums"
    kind: Literal["sums"] = "sums"
    """Source of the prompts. sums: one-digit sums; reasoning_gym: procedural tasks; environment: the tasks of
    environment.path itself; file: a JSON, CSV or Parquet file; huggingface: a data set of the Hugging Face hub or of
    a local directory."""
    lengths: tuple[int, ...] = Field((2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 5, 5, 6, 6, 8, 20), min_length=1)
    """Numbers of summands, drawn uniformly; repeat a number to draw it more often. The long sums in the default make
    the long tail of the rollout lengths."""


class LargestNumberPrompts(PromptsSection):
    """Prompts such as "Pick the largest number: 46, 56, 59", with three numbers from 10 to 99: the task of the preset
    smollm2."""

    verifier: ClassVar = "last_number"
    kind: Literal["largest_number"] = "largest_number"


class ReasoningGymPrompts(PromptsSection):
    """Procedural tasks of the reasoning-gym library, scored by its own verifiers."""

    verifier: ClassVar = "reasoning_gym"
    kind: Literal["reasoning_gym"] = "reasoning_gym"
    tasks: tuple[str, ...] = Field(("chain_sum",), min_length=1)
    """Names of reasoning-gym tasks (docs/gym_tasks.md), drawn uniformly."""
    options: dict[str, dict[str, Any]] = Field({})
    """Options of tasks, by task; docs/gym_tasks.md lists them. Example: prompts.options.chain_sum.max_terms=4."""
    levels: dict[str, int] = Field({})
    """Level of difficulty of tasks, by task, from 0: the library's curriculum sets the options of the task, and
    prompts.options replaces single ones. Example: prompts.levels.chain_sum=3."""


class EnvironmentPrompts(PromptsSection):
    """The tasks of the environment itself: its methods `task` and `held_out` (environment.path)."""

    from_environment: ClassVar = True
    kind: Literal["environment"] = "environment"


class RowPrompts(PromptsSection):
    """The keys of prompts that are rows of a table."""

    verifier: ClassVar = "exact_match"
    path: str
    """kind=file: a .jsonl, .json, .csv, .tsv or .parquet file; kind=huggingface: name on the hub, a directory written
    by `save_to_disk`, or a directory of data files."""
    prompt_column: str = "prompt"
    """Column with the text shown to the model."""
    answer_column: str = "answer"
    """Column with the right answer."""
    template: str = ""
    """Text shown to the model, with columns of the row in braces, for example "{question}\\nAnswer with a number."
    Write {{ and }} for braces. Empty: the text of prompt_column."""
    held_out_share: float = Field(0, ge=0, lt=1)
    """Share of the different prompts that is held out from training, at least one prompt; not used with a held-out
    set of one's own. 0: a twentieth, but at least 16 prompts, or a fifth of fewer than 80."""


FILE_SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
"""Endings of the name of a file of rows."""


class FilePrompts(RowPrompts):
    """Rows of a JSON, CSV or Parquet file."""

    kind: Literal["file"] = "file"
    held_out_path: str = ""
    """kind=file: a file with held-out prompts of one's own, with the same columns; empty: held_out_share of the rows
    of `path` is held out."""

    def held_out_in(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        return {"held_out_path": changes["path"]} if "path" in changes else {}


class HuggingFacePrompts(RowPrompts):
    """A data set of the Hugging Face hub by name, or a local one by path."""

    kind: Literal["huggingface"] = "huggingface"
    split: str = "train"
    """Split of the data set to train on."""
    config_name: str = ""
    """kind=huggingface: configuration of the data set, for example main of openai/gsm8k; empty: its only or default
    configuration."""
    held_out_split: str = ""
    """kind=huggingface: split with held-out prompts, for example test; empty: held_out_share of the rows of `split`
    is held out."""

    def held_out_in(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        is_other = changes.keys() & {"path", "split"} or ("config_name" in changes and not self.held_out_split)
        return {"held_out_split": self.split} if is_other else {}


PromptsConfig = Annotated[
    SumsPrompts | LargestNumberPrompts | ReasoningGymPrompts | EnvironmentPrompts | FilePrompts | HuggingFacePrompts,
    Field(discriminator="kind"),
]
