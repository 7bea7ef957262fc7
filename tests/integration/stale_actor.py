"""An actor with a fault: its engine stamps its tokens with every new version, and takes no new weights.

--skip=N: its engine skips only the N-th swap. --layer: one layer stays three versions old. --temperature: from its
third swap on it samples 5 % hotter than asked. --tokenizer: instead, its chat template is another one.
"""

import sys
from collections import deque

from pipelinerl_core.engine.embedded.decoder import SlotDecoder
from pipelinerl_core.engine.embedded.slots import SlotTable
from pipelinerl_core.roles.actor import main as actor

LAYER = ".layers.1."
FAULTS = ("--skip", "--layer", "--temperature", "--tokenizer")


def with_old_layer(load, age=3):
    past = deque(maxlen=age + 1)

    def faulty(self, staged):
        past.append({name: tensor.clone() for name, tensor in staged.tensors.items() if LAYER in name})
        assert past[-1], "the model has this layer"
        return load(self, staged._replace(tensors={**staged.tensors, **past[0]}))

    return faulty


def hotter(admit, load):
    swaps = []

    def counting(self, staged):
        swaps.append(1)
        return load(self, staged)

    def faulty(self, slot, request, *, num_fed):
        admit(self, slot, request, num_fed=num_fed)
        if len(swaps) >= 3:
            self._temperature[slot] *= 1.05

    return faulty, counting


if __name__ == "__main__":
    load, digests = SlotDecoder.load, actor.token_digests
    fault, _, number = next((argument for argument in sys.argv if argument.startswith(FAULTS)), "").partition("=")
    sys.argv = [argument for argument in sys.argv if not argument.startswith(FAULTS)]
    swaps = iter(range(1, 1 << 30))
    if fault == "--tokenizer":
        actor.token_digests = lambda config: {**digests(config), "chat template": "another"}
    elif fault == "--temperature":
        SlotTable.admit, SlotDecoder.load = hotter(SlotTable.admit, load)  # type: ignore[method-assign]
    elif fault == "--layer":
        SlotDecoder.load = with_old_layer(load)  # type: ignore[method-assign]
    elif fault == "--skip":
        SlotDecoder.load = lambda self, staged: [] if next(swaps) == int(number) else load(self, staged)  # type: ignore[method-assign]
    else:
        SlotDecoder.load = lambda self, staged: []  # type: ignore[method-assign]
    sys.exit(actor.main())
