"""The actor: samples rollouts on one engine, and swaps new weights in while sequences run."""

from pipelinerl_core.roles.runtime import lean_transformers  # noqa: F401 - before any other module imports transformers
