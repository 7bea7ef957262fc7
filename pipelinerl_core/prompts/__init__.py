"""Deterministic, resumable prompt sources and chat templates."""

from pipelinerl_core.prompts.chat import encode_prompt
from pipelinerl_core.prompts.source import build_source

__all__ = ["build_source", "encode_prompt"]
