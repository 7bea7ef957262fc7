"""A workload of the learner's benchmark that takes a second."""

from benchmarks.learner_rounds import Workload
from benchmarks.sizes import SIZES

MINI = Workload(
    name="mini", num_groups=2, group_size=4, median_tokens=6, max_tokens=20, pack_tokens=64,
    model={**SIZES["tiny"], "num_hidden_layers": 1},
)  # fmt: skip
