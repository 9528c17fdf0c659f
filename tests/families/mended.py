"""A worker extension for LFM2 on the CPU: heads are rotated by their tokens' positions.

vLLM's CPU kernel takes the last dimension for all heads of a token. LFM2 hands it a dimension for heads, so of a step
only the first of so many tokens are rotated, by wrong positions: answers depend on how a prompt is cut into steps.
Threading: the patch is made when vLLM imports this module in its worker, before anything is computed.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm import _custom_ops

from tests.families.extensions import FamilyExtension as MendedExtension  # noqa: F401 - by name

_rotate = _custom_ops.rotary_embedding


def _rotate_tokens(positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None, *more: Any) -> None:
    rows = len(positions)
    _rotate(positions, query.view(rows, -1), None if key is None else key.view(rows, -1), *more)


_custom_ops.rotary_embedding = _rotate_tokens
