"""The trainer: optimizer steps on reserved groups, commits, and weight versions."""
