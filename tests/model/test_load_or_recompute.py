"""Load or recompute over servers fast and slow, simulated: as many requests per second as the better of always loading
and always computing, and no worse TTFT where one of them is better in both.
"""

from __future__ import annotations

import pytest

from tests.model.serving_simulation import Server, measure

GRID = [
    Server(at_a_time, prefill, speed)
    for at_a_time in (1, 4, 32)
    for prefill in (2e3, 2e4, 1e5)
    for speed in (0.2e9, 1e9, 5e9, 20e9)
]


@pytest.mark.parametrize("server", GRID, ids=lambda server: "-".join(f"{value:g}" for value in server))
def test_no_server_is_slower_than_with_the_better_fixed_rule(server: Server) -> None:
    cell = measure(server)
    assert cell.rate_ratio >= 0.95
    if cell.rate_ratio < 1.05:
        assert cell.ttft_ratio <= 1.15, "a trial is measured, too"
    else:
        assert cell.ttft_ratio <= 1.7, "more requests per second are served, by both the tier and the GPU"
