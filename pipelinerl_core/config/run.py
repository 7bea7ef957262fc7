"""The configuration of a run."""

from typing import Self

from pydantic import model_validator

from pipelinerl_core.config.rules import first_problem
from pipelinerl_core.config.settings import Settings


class RunConfig(Settings):
    """All settings of a run, which break no rule between sections."""

    @model_validator(mode="after")
    def _rules_between_sections(self) -> Self:
        problem = first_problem(self)
        if problem is not None:
            raise ValueError(problem)
        return self

    def without_labels(self) -> Self:
        """The same settings for another run: without name, tags, notes and owner."""
        labels = {"name": "", "tags": (), "notes": "", "owner": ""}
        return self.model_copy(update={"tracking": self.tracking.model_copy(update=labels)})
