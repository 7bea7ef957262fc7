"""Parameters of flows: the most common settings as typed, bounded fields of a form.

The Prefect server rejects invalid values.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo

from pipelinerl_core.config.load import known_keys, preset_names, variants
from pipelinerl_core.config.prompts import FILE_SUFFIXES

F = TypeVar("F", bound=Callable[..., Any])

Run = Annotated[str, Field(description="Id under the root, `latest`, or the path or URL of a run.")]
RunUrl = Annotated[str, Field(description="URL of the run in the object store; the train flow sets it.")]
Root = Annotated[
    str,
    Field(description="Directory or URL below which runs are stored. Empty: $PIPELINERL_ROOT if set, else ./runs."),
]
"""Of flows that read a run; `train_flow.Root` is for flows that store runs."""

KEYS: Mapping[str, str] = MappingProxyType(
    {
        "name": "tracking.name",
        "tags": "tracking.tags",
        "notes": "tracking.notes",
        "owner": "tracking.owner",
        "experiment": "tracking.experiment",
        "model": "model.path",
        "chat_template": "model.chat_template",
        "data": "prompts.path",
        "reward": "reward.function",
        "environment": "environment.path",
        "steps": "trainer.steps",
        "seed": "seed",
        "actors": "placement.actors",
        "placement": "placement.kind",
        "gpu": "placement.gpu",
        "trainer_ranks": "trainer.ranks",
        "engine": "engine.kind",
        "concurrency": "engine.concurrency",
        "schedule": "schedule.kind",
        "max_lag": "schedule.max_lag",
        "groups_per_step": "trainer.groups_per_step",
        "group_size": "rollouts.group_size",
        "max_tokens": "rollouts.max_tokens",
        "learning_rate": "learner.lr",
        "lora_rank": "learner.lora_rank",
        "loss": "loss.kind",
        "eval_steps": "eval.every_steps",
    }
)
"""Field -> key of the configuration."""


def preset_pattern() -> str:
    """Pattern of JSON schema for a shipped preset or the path of a file."""
    return rf"^({'|'.join(map(_literal, preset_names()))})$|[./]"


def override_pattern() -> str:
    """Pattern of JSON schema for "section.key=value" with a key that exists, or "section={...}". The server would
    keep the password of a URL (user:password@host): no value has such a URL."""
    keys = known_keys()
    named = "|".join(_literal(key).replace("<name>", "[^.=]+") for key in keys)
    sections = "|".join(sorted({key.partition(".")[0] for key in keys}))
    return rf"^(?!.*://\S*:\S*@)(({named})(\.[^=]+)?|{sections})="


def _literal(name: str) -> str:
    return name.replace(".", r"\.")


def _as_plain_fields(schema: dict[str, Any]) -> None:
    """Replace "type or null" by the type alone: for "integer or null" Prefect's form first asks for the type.

    For an empty field the form sends null. The server accepts null for a field without a default; a field with an
    enum must list null.
    """
    for field in schema["properties"].values():
        (given,) = (kind for kind in field.pop("anyOf") if kind.get("type") != "null")
        field.update(given)
        field.pop("default")
        if "enum" in field:
            field["enum"] = [*field["enum"], None]


class Settings(BaseModel):
    """The settings that differ between experiments; an empty field keeps the value of the preset."""

    model_config = ConfigDict(extra="forbid", frozen=True, title="Settings", json_schema_extra=_as_plain_fields)

    name: str | None = Field(None, max_length=100, description="Name of the run; the run id begins with it.")
    tags: str | None = Field(None, description="Labels, for example exp42,team:alice.")
    notes: str | None = Field(
        None, max_length=5000, description="Why the run exists; the description of the run in MLflow."
    )
    owner: str | None = Field(None, max_length=100, description="Whose run this is; empty: the user of the worker.")
    experiment: str | None = Field(None, description="The MLflow experiment that lists the run, for example a study.")
    model: str | None = Field(
        None, description="Directory or hub name (org/name) of a model, on the machines of the run."
    )
    chat_template: bool | None = Field(
        None, description="Wrap each prompt with the model's chat template. Set for instruction-tuned models."
    )
    data: str | None = Field(
        None,
        description="A .jsonl, .json, .csv, .tsv or .parquet file, or the name of a data set of the hub. "
        "Columns: prompt and answer, or set prompts.template, prompts.prompt_column, prompts.answer_column in the "
        "overrides.",
    )
    reward: str | None = Field(None, description="Your reward function: FILE.py:FUNCTION or package.module:FUNCTION.")
    environment: str | None = Field(
        None, description="Class that plays episodes of several turns: FILE.py:CLASS or package.module:CLASS."
    )
    steps: int | None = Field(None, ge=1, description="Optimizer steps of the run.")
    seed: int | None = Field(None, ge=0, description="Seed of prompts, sampling and initial order.")
    actors: int | None = Field(None, ge=1, description="Actors that generate at the same time; each has one engine.")
    placement: Literal["local", "work_pools"] | None = Field(
        None,
        description="local: all roles on the machine of this flow run; work_pools: actors and trainer on work pools.",
    )
    gpu: str | None = Field(
        None,
        coerce_numbers_to_str=True,
        description="GPU of the machines of actors and trainer, such as H100, A100-40GB, or its memory in GB: with "
        "work_pools, the start is refused if the run does not fit. Which run needs which: docs/gpus.md.",
    )
    trainer_ranks: int | None = Field(
        None, ge=1, description="Trainer processes, each with its own GPU: the number of GPUs for training."
    )
    engine: str | None = Field(
        None, description="The inference engine.", json_schema_extra={"enum": list(variants("engine"))}
    )
    concurrency: int | None = Field(None, ge=1, description="Sequences in flight in each engine.")
    schedule: str | None = Field(
        None,
        description="pipeline: generation and training overlap; conventional and april: they take turns.",
        json_schema_extra={"enum": list(variants("schedule"))},
    )
    max_lag: int | None = Field(None, ge=0, description="Largest lag of a trained token, in optimizer steps.")
    groups_per_step: int | None = Field(None, ge=1, description="Prompts in one optimizer step.")
    group_size: int | None = Field(None, ge=2, description="Rollouts of one prompt.")
    max_tokens: int | None = Field(None, ge=1, description="Largest number of tokens of a completion.")
    learning_rate: float | None = Field(None, gt=0, description="Peak learning rate.")
    lora_rank: int | None = Field(
        None,
        ge=0,
        description="Train LoRA adapters of this rank (8 to 64) instead of all weights, which needs less GPU memory; "
        "0: all weights.",
    )
    loss: str | None = Field(
        None,
        description="The loss, with the options of its paper.",
        json_schema_extra={"enum": [kind for kind in variants("loss") if kind != "custom"]},  # needs further keys
    )

    eval_steps: int | None = Field(
        None,
        ge=0,
        description="Optimizer steps between two evaluations on held-out prompts; 0: a tenth of all steps.",
    )

    def overrides(self) -> tuple[str, ...]:
        """ "section.key=value" for each field that is set."""
        given = self.model_dump(exclude_none=True)
        kind = "file" if str(given.get("data", "")).endswith(FILE_SUFFIXES) else "huggingface"
        before = (f"prompts.kind={kind}",) if "data" in given else ()  # clears the keys of the preset's kind
        return (*before, *(f"{KEYS[name]}={value}" for name, value in given.items()))


def described(function: F) -> F:
    """Append the descriptions of `Annotated[..., Field(description=...)]` parameters to the docstring as "Args:".

    Prefect reads the descriptions of parameters from the docstring and ignores the annotations. Apply this decorator
    below @flow.
    """
    lines = []
    for name, hint in get_type_hints(function, include_extras=True).items():
        for known in getattr(hint, "__metadata__", ()):
            if isinstance(known, FieldInfo) and known.description:
                lines.append(f"    {name}: {known.description}")
    function.__doc__ = f"{function.__doc__}\n\nArgs:\n" + "\n".join(lines)
    return function
