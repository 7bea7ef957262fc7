"""The trainer: optimizer steps on reserved groups, commits, and weight versions."""

from pipelinerl_core.roles.runtime import lean_transformers  # noqa: F401 - before any other module imports transformers
