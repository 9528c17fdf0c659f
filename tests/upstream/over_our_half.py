"""A pytest plugin for vLLM's own tests: the connector that they make has our scheduler's half, over a mocked manager.

Threading: one test's thread. Loaded by ``run.py`` in vLLM's source tree, which brings a package ``tests`` of its own.
"""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import offloading_connector

from nixl_offload.vllm.connector_scheduler import NixlOffloadScheduler

_VERSIONS = count()


class MockedManager:
    """Answers what our half asks beyond vLLM's contract as if there were nothing to add; hands on the rest."""

    moves_ahead = SimpleNamespace(fetches=(), awaits_fetch=lambda *_: False, end_fetch=lambda *_: None)
    catalog = SimpleNamespace(changes=[()], version=0, recent=(), tiers=(), moves=moves_ahead)
    metrics = SimpleNamespace(worked=lambda *_: None, looked_up=lambda *_: None)
    decider = SimpleNamespace(
        prefill=SimpleNamespace(scheduled=lambda *_: None, ended=lambda *_: None),
        tokens_to_load=lambda hit, *_, **__: hit.tokens,
        wait_left_s=lambda *_: 60.0,
        may_wait=lambda *_, **__: True,
        is_long=lambda *_: False,
    )
    """Loads every hit."""
    will_store = False
    is_looking = False
    serving = SimpleNamespace(is_whole=True, is_begun=False)
    """Ranks have not said which weights they have, and nothing waits for that."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self.moves: list[Any] = []
        self.removed: list[Any] = []

    @property
    def version(self) -> int:
        """Answers of a mocked manager may change at any time."""
        return next(_VERSIONS)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)

    def take_ranks(self, ranks: Any) -> None: ...
    def leading_hits(self, keys: Any, req_context: Any) -> int:
        return 0

    def where(self, keys: Any, req_context: Any = None) -> list[None]:
        return [None] * len(keys)

    def has_pending_work(self) -> bool:
        return False

    def is_known(self, key: Any) -> bool:
        return False

    def settle(self, reports: Any, loads: Any = ()) -> set[Any]:
        return set()


class OurHalf(NixlOffloadScheduler):
    """Ours, over the manager that the test's spec makes. Nothing waits for ranks, for none will report."""

    def has_pending_push_work(self) -> bool:
        return super(NixlOffloadScheduler, self).has_pending_push_work()

    def _awaits_adapter(self, state: Any) -> bool:
        super()._awaits_adapter(state)
        return False

    @property
    def offload_manager(self) -> Any:
        return MockedManager(self.manager)


offloading_connector.OffloadingConnectorScheduler = OurHalf
