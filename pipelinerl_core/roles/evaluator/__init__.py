"""The evaluator: measures the held-out accuracy of weight versions on an engine of its own."""

from pipelinerl_core.roles.runtime import lean_transformers  # noqa: F401 - before any other module imports transformers
