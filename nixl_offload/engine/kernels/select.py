"""Which kernels a group gets: Triton's where it runs and the pages fit it, else torch's.

Threading: called once per group at start.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nixl_offload.engine.kernels.base import GroupKernels, Page
from nixl_offload.engine.kernels.torch_kernels import TorchKernels


def open_kernels(tensors: Sequence[torch.Tensor], pages: Sequence[Page]) -> GroupKernels:
    """Return the kernels of one group. ``tensors``: all KV tensors, uint8 of shape (num_blocks, page_bytes), rows
    contiguous, any stride; ``pages``: those of the group.
    """
    return TorchKernels(tensors, pages)
