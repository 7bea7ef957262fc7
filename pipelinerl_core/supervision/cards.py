"""Table of accelerators: memory, peak FLOPs and memory bandwidth, from the data sheets of the vendors."""

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class Card(NamedTuple):
    """An accelerator."""

    gib: float
    """GiB of memory that the driver offers."""
    teraflops: float
    """Peak 10^12 FLOPs per second, dense bfloat16 with float32 sums; T4 and V100: float16."""
    terabytes: float
    """Memory bandwidth, 10^12 bytes per second."""


CARDS: Mapping[str, Card] = MappingProxyType(
    {
        "T4": Card(15.0, 65, 0.32), "L4": Card(22.5, 121, 0.30), "A10": Card(22.5, 125, 0.60),
        "A10G": Card(22.5, 70, 0.60), "RTX3090": Card(24.0, 71, 0.936), "RTX4090": Card(24.0, 165, 1.008),
        "RTX5090": Card(32.0, 210, 1.792), "V100": Card(16.0, 125, 0.90), "V100-32GB": Card(32.0, 125, 0.90),
        "A100-40GB": Card(40.0, 312, 1.555), "A100": Card(80.0, 312, 2.039), "A6000": Card(48.0, 155, 0.768),
        "L40S": Card(45.0, 362, 0.864), "RTX6000ADA": Card(48.0, 364, 0.96), "H100": Card(80.0, 989, 3.35),
        "H20": Card(96.0, 148, 4.0), "H200": Card(141.0, 989, 4.8), "GH200": Card(96.0, 989, 4.0),
        "B200": Card(180.0, 2250, 7.7), "MI300X": Card(192.0, 1307, 5.3),
    }
)  # fmt: skip
"""Name of an accelerator -> its figures; H100, H200 and A100 with SXM sockets."""


def known_card(name: str) -> str | None:
    """The name in CARDS of a name as a driver or a user writes it; None: unknown.

    Examples: "h100" and "NVIDIA H100 80GB HBM3" are H100.
    """
    plain = {key.lower().replace("-", ""): key for key in CARDS}
    text = re.sub(r"nvidia|geforce", "", name.lower())
    words = [re.sub(r"[\s_-]", "", text), *re.split(r"[\s_-]+", text)]
    return next((plain[word] for word in words if word in plain), None)
