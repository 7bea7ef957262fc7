"""Check the prompt source of the configuration on stdin: exit code 2 and one line on stderr if it cannot be used."""

import json
import sys

from pipelinerl_core.config import build_config
from pipelinerl_core.errors import ConfigError
from pipelinerl_core.prompts import build_source


def main() -> int:
    """Returns the exit code."""
    try:
        config = build_config(json.load(sys.stdin))
        source = build_source(config)
        source.prompt(0)
        source.held_out(min(1, config.eval.num_prompts))
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
