"""Matrix products with float32 results, from operands in float32 or bfloat16.

The product of two bfloat16 numbers is exact in float32. A GPU's tensor cores multiply bfloat16 operands and add in
float32: the result is that of a float32 product of the same operands but for the rounding of sums, and the data sheet
of an H100 has 989 TFLOP/s for it instead of 67. torch has this product for CUDA; elsewhere operands are converted to
float32.

Shapes: I, J = rows and columns of a result, K = terms of each sum.
"""

import functools
import logging

import torch
from torch import Tensor

logger = logging.getLogger(__name__)


def operand_dtype(*tensors: Tensor) -> torch.dtype:
    """The type to which these tensors must be converted before the functions below multiply them.

    bfloat16 if all tensors are in bfloat16 and their device has a product with a float32 result, else float32.
    """
    device = tensors[0].device
    is_bfloat16 = all(tensor.dtype == torch.bfloat16 for tensor in tensors)
    return torch.bfloat16 if is_bfloat16 and has_mixed_product(device) else torch.float32


def has_mixed_product(device: torch.device) -> bool:
    """Whether bfloat16 operands have a product with a float32 result on a device.

    Never on a CPU, even if a later torch has the product there: recorded runs are replayed to the last bit.
    """
    return device.type == "cuda" and is_mixed_product_exact(device)


@functools.cache
def is_mixed_product_exact(device: torch.device) -> bool:
    """Whether the product works and its sums are in float32; waits for the device, once per device."""
    row_IK = torch.tensor([[1.0, 2.0**-12]], dtype=torch.bfloat16, device=device)
    column_KJ = torch.ones(2, 1, dtype=torch.bfloat16, device=device)
    try:
        is_exact = _mixed(row_IK, column_KJ).item() == 1.0 + 2.0**-12  # bfloat16 would round this sum to 1
    except (RuntimeError, TypeError) as error:
        reason = str(error).partition("\n")[0]
        logger.warning("%s: logits are computed from float32 operands, which is slower (%s)", device, reason)
        return False
    return is_exact


def product(left_IK: Tensor, right_KJ: Tensor) -> Tensor:
    """left @ right in float32."""
    return left_IK @ right_KJ if right_KJ.dtype == torch.float32 else _mixed(left_IK, right_KJ)


def add_product(total_IJ: Tensor, left_IK: Tensor, right_KJ: Tensor) -> None:
    """total += left @ right, total in float32."""
    if right_KJ.dtype == torch.float32:
        total_IJ.addmm_(left_IK, right_KJ)
    else:
        total_IJ.add_(_mixed(left_IK, right_KJ))


def parts_of(exact_IK: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Terms of type `dtype` whose sum is a float32 tensor; bfloat16: high + low, to 2^-17 of each element.

    A gradient rounded to bfloat16 alone would be off by up to 2^-8 of each element.
    """
    if dtype == torch.float32:
        return (exact_IK,)
    high_IK = exact_IK.to(dtype)
    return high_IK, (exact_IK - high_IK).to(dtype)


def _mixed(left_IK: Tensor, right_KJ: Tensor) -> Tensor:
    return torch.mm(left_IK, right_KJ, out_dtype=torch.float32)
