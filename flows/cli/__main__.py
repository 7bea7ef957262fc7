"""`python -m pipelinerl.flows.cli`."""

from pipelinerl.flows.cli import main

main()
