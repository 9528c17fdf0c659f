"""Whether a shared tier's storage works: what became of questions, loads and stores, and what may be tried now.

Threading: the scheduler's thread alone. No I/O, no clock: time is passed in (monotonic seconds).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from nixl_offload.errors import StoreError
from nixl_offload.tiers.breaker import Breaker, BreakerState
from nixl_offload.types import Key, LookupContext, Outcome

STORAGE_FAILED: Final = frozenset({Outcome.FAILED, Outcome.TAINTED})
FLAP_WINDOW_S: Final = 30.0
"""A bucket that asks to slow down answers the next trial: trouble that comes back so soon doubles the pause."""


class StorageHealth:
    """Three breakers, for the tier may fail in three ways: the storage does not answer questions; it answers, but loads
    fail; it answers, but stores fail. The first disables everything, the others loads and stores alone.
    """

    def __init__(self, name: str) -> None:
        """``name`` opens each log line, such as "S3 tier s3://bucket/prefix"."""
        self._reach = Breaker(name, flap_window_s=FLAP_WINDOW_S)
        self._loads = Breaker(f"{name}, loading")
        self._stores = Breaker(f"{name}, storing")
        self._load_trial: str | None = None
        """The request that tries whether loads work again."""

    @property
    def answers(self) -> bool:
        """Whether the storage answers questions, by all that is known."""
        return self._reach.closed

    @property
    def in_use(self) -> bool:
        """Whether it answers and loads work, by all that is known."""
        return self._reach.closed and self._loads.closed

    @property
    def trouble(self) -> str:
        """Why the tier is disabled, in a word; ``none`` while all is well."""
        return self._reach.cause or self._loads.cause or self._stores.cause or "none"

    @property
    def openings(self) -> int:
        """How often a breaker has opened."""
        return self._reach.openings + self._loads.openings + self._stores.openings

    def breakers(self) -> dict[str, BreakerState]:
        """Return the state of each breaker by what it watches: ``reach``, ``load`` or ``store``."""
        return {"reach": self._reach.state, "load": self._loads.state, "store": self._stores.state}

    # What may be tried

    def may_try(self, now_s: float) -> bool:
        """Whether one question may go out although the storage does not answer. Its answer goes to ``tried``."""
        return self._reach.allows(now_s)

    def may_load(self, context: LookupContext, now_s: float) -> bool:
        """Whether this request may load. While loads fail, one request at a time may, as a trial."""
        if self._loads.closed:
            return True
        was_freed = self._load_trial is None and self._loads.state is BreakerState.HALF_OPEN
        if self._load_trial != context.request_id and (was_freed or self._loads.allows(now_s)):
            self._load_trial = context.request_id
        return self._load_trial == context.request_id

    def may_store(self, now_s: float) -> bool:
        """Whether to store now. While stores fail, one at a time may, as a trial."""
        return self._reach.closed and (self._stores.closed or self._stores.allows(now_s))

    def forget_request(self, request_id: str) -> None:
        """It loads nothing any more: if it was the trial and has found nothing to load, the next may try at once."""
        if self._load_trial == request_id:
            self._load_trial = None

    # What became of it

    def answered(self, asked_s: float, error: StoreError | None, now_s: float) -> None:
        """A question is back. The failure of one from before the storage last recovered says nothing."""
        if self._reach.closed and (error is None or asked_s >= self._reach.closed_s):
            self._note(error, now_s)

    def tried(self, error: StoreError | None, now_s: float) -> None:
        """The question that ``may_try`` let through is back."""
        if not self._reach.closed:
            self._note(error, now_s)

    def stored(self, keys: Sequence[Key], failed: Mapping[Key, Outcome], now_s: float) -> None:
        """A store is over."""
        if len(failed) < len(keys):
            self._stores.succeeded(now_s)
        elif not STORAGE_FAILED.isdisjoint(failed.values()):
            self._stores.failed("stores", f"none of {len(keys)} chunks could be stored", now_s)

    def loaded(self, keys: Sequence[Key], failed: Mapping[Key, Outcome], now_s: float) -> Key | None:
        """A load is over. Where nothing came, returns a chunk to look for, whose answer goes to ``rechecked``."""
        if len(failed) < len(keys) or Outcome.CORRUPT in failed.values():
            self._loads.succeeded(now_s)
            self._load_trial = None
        elif not STORAGE_FAILED.isdisjoint(failed.values()):
            return next(key for key in keys if failed[key] in STORAGE_FAILED)
        return None

    def rechecked(self, is_whole: bool, error: StoreError | None, now_s: float) -> None:
        """Somebody looked whether a chunk that could not be loaded is there."""
        if error is not None:
            if self._reach.closed:
                self._note(error, now_s)
        elif is_whole:
            self._loads.failed("loads", "chunks that are there could not be read", now_s)
        else:
            # Deleted by somebody: nothing is wrong with the storage, and a trial has not failed.
            self._loads.succeeded(now_s)
        self._load_trial = None

    def _note(self, error: StoreError | None, now_s: float) -> None:
        if error is None:
            self._reach.succeeded(now_s)
        else:
            self._reach.failed(error.cause, str(error), now_s)
