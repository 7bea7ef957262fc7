"""An actor with a fault: its engine stamps its tokens with every new version, and takes no new weights.

--skip=N: its engine skips only the N-th swap. --tokenizer: instead, its chat template is another one.
"""

import sys

from pipelinerl_core.engine.embedded.decoder import SlotDecoder
from pipelinerl_core.roles.actor import main as actor

if __name__ == "__main__":
    load, digests = SlotDecoder.load, actor.token_digests
    skipped = [argument for argument in sys.argv if argument.startswith("--skip=")]
    swaps = iter(range(1, 1 << 30))
    if "--tokenizer" in sys.argv:
        sys.argv.remove("--tokenizer")
        actor.token_digests = lambda config: {**digests(config), "chat template": "another"}
    elif skipped:
        sys.argv.remove(skipped[0])
        number = int(skipped[0].partition("=")[2])
        SlotDecoder.load = lambda self, tensors: None if next(swaps) == number else load(self, tensors)  # type: ignore[method-assign]
    else:
        SlotDecoder.load = lambda self, tensors: None  # type: ignore[method-assign]
    sys.exit(actor.main())
