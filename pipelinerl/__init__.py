"""The importable names of flows/ and tasks/: `pipelinerl.flows` and `pipelinerl.tasks` (docs/adr/0015)."""
