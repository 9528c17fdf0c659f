"""What our scheduler's half notes of one request, in the record that vLLM's half keeps of it.

Threading: the scheduler's thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import ReqContext

    from nixl_offload.catalog.estimate import Part
    from nixl_offload.vllm.adapters import AdapterUse


class LookedUp(NamedTuple):
    """What a request asked about and found."""

    first_token: int
    asked_tokens: int
    """Whole chunks behind what the GPU's cache has."""
    found_tokens: int


class LoadDecision(NamedTuple):
    """How much of a hit is loaded."""

    first_token: int
    tokens: int
    loaded_tokens: int
    parts: tuple[Part, ...] = ()
    """Which tiers have them, from the beginning on."""
    trial: int | None = None
    """The tier that this load tries, though it was judged too slow."""


@dataclass(slots=True)
class RequestNotes:
    """The notes of one request, from its arrival until vLLM forgets it."""

    stores: bool = True
    """Whether its chunks may be stored."""
    loads: bool = True
    """Whether chunks may be loaded for it. Where its keys do not name content, neither is done."""
    has_adapter: bool = False
    adapter: AdapterUse | None = None
    """The LoRA adapter that its keys stand for. None for a request with one: its content is not known yet, and the
    request is neither stored nor loaded."""
    allowed_tiers: frozenset[int] | None = None
    """By position, where ``kv_load_tiers`` restricts them; None: not worked out yet."""
    waits_since_s: float | None = None
    """When it began to wait for storage, so that it waits once; None: it does not wait."""
    decision: LoadDecision | None = None
    """The latest, so that each hit is decided once."""
    looked_up: LookedUp | None = None
    """The latest lookup that was not counted yet: it is counted once the request is scheduled."""

    def refuse(self) -> None:
        """Neither store nor load this request from now on."""
        self.stores = self.loads = False

    @property
    def knows_keys(self) -> bool:
        """Whether the keys stand for what was, or will be, computed."""
        return not self.has_adapter or self.adapter is not None


def notes_of(req_context: ReqContext) -> RequestNotes:
    """Return the notes of a request."""
    notes = req_context.get_state(RequestNotes)
    if notes is None:
        notes = RequestNotes()
        req_context.set_state(notes)
    return notes
