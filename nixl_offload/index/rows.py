"""What a journal remembers of many chunks: columns instead of an object per chunk.

Threading: immutable values, safe anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import compress
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from nixl_offload.types import Key

Row = tuple[Key, int, int]
"""key, offset, slot_bytes."""


class Rows(NamedTuple):
    """Some rows, as columns of one length, the oldest first."""

    keys: Sequence[Key]
    offsets: npt.NDArray[np.int64]
    slot_bytes: npt.NDArray[np.int64]

    def where(self, wanted: npt.NDArray[np.bool_]) -> Rows:
        """Return the rows for which ``wanted`` is true."""
        if wanted.all():
            return self
        return Rows(list(compress(self.keys, wanted.tolist())), self.offsets[wanted], self.slot_bytes[wanted])

    def singly(self) -> Iterator[Row]:
        """Yield row after row."""
        return zip(self.keys, self.offsets.tolist(), self.slot_bytes.tolist(), strict=True)
