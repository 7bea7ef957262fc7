"""Load models as one of the ranks among which ZeRO 3 divides the weights, in a process of its own.

    python -m tests.integration.divided_case RANK RANKS MEETING_FILE DIRECTORY...

Prints a JSON object: directory -> what differs from the model as one process loads it, and this rank's elements.
"""

import json
import sys
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist

from pipelinerl_core.models.resolve import load_config
from pipelinerl_core.training.deepspeed_learner import divided_among
from pipelinerl_core.training.model import load_model, own_part
from pipelinerl_core.training.ranks import Ranks

DTYPE = "bfloat16"


def compared(directory, ranks):
    settings = [f"model.path={directory}", "learner.kind=deepspeed", "learner.zero_stage=3", f"model.dtype={DTYPE}"]
    dividing = divided_among(ranks, load_config("quickstart", settings), torch.device("cpu"))
    whole, divided = load_model(directory, DTYPE), load_model(directory, DTYPE, dividing=dividing)
    own_elements = sum(own_part(parameter, ranks.rank).numel() for parameter in divided.parameters())
    with deepspeed.zero.GatheredParameters(list(divided.parameters())):
        pairs = {name: [tensor] for name, tensor in (*whole.named_parameters(), *whole.named_buffers())}
        for name, tensor in (*divided.named_parameters(), *divided.named_buffers()):
            pairs.setdefault(name, []).append(tensor)
        differing = [
            name
            for name, tensors in pairs.items()
            if len(tensors) != 2 or tensors[0].dtype != tensors[1].dtype or not torch.equal(*tensors)
        ]
    return {
        "differing": differing,
        "elements": sum(parameter.numel() for parameter in whole.parameters()),
        "own_elements": own_elements,
    }


def main(rank, size, meeting, directories):
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
    results = {directory: compared(Path(directory), Ranks(rank, size)) for directory in directories}
    dist.destroy_process_group()
    print(json.dumps(results))  # noqa: T201


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:])
