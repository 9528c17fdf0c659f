"""Products of parameters too large for `make test`: a diagonal of them runs there, all of them in `make test-long`."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

import pytest


def thinned(**axes: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of ``pytest.mark.parametrize`` for all combinations of values, which each axis names.

    Those off the diagonal are marked ``long``: one of n stays, n being the length of the longest axis but one, and with
    them each value of each axis.
    """
    n = sorted(map(len, axes.values()))[-2]
    return {
        "argnames": list(axes),
        "argvalues": [
            pytest.param(
                *(value for _, (_, value) in chosen),
                id="-".join(name for _, (name, _) in chosen),
                marks=[pytest.mark.long] if sum(at for at, _ in chosen) % n else [],
            )
            for chosen in product(*(list(enumerate(axis.items())) for axis in axes.values()))
        ],
    }
