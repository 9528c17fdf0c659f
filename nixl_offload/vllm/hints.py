"""Carries out hints: a router's wishes in a request's ``kv_transfer_params``. docs/hints.md is for users.

Threading: the scheduler's thread. Each step hashes a limited number of blocks, so that no step waits.
Failure: a hint never raises. A bad one is counted, and the first of its kind is logged.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final, cast

from pydantic import BaseModel, ConfigDict, Field, InstanceOf, ValidationError
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    RequestOffloadState,
    SchedulerOffloadConfig,
)
from vllm.v1.request import Request

from nixl_offload.types import Key
from nixl_offload.vllm.manager import NixlOffloadManager
from nixl_offload.vllm.vllm_scheduler import notes_of, state_like

logger = logging.getLogger(__name__)

FIELD: Final = "nixl_offload"
"""The field of ``kv_transfer_params`` that holds a hint."""
MAX_TOKENS: Final = 1 << 20
MAX_PROMPTS: Final = 256
"""Prompts of hints that wait to be hashed."""
MAX_WAITING_TOKENS: Final = 4 << 20
"""Tokens of these prompts: some 150 MB."""
HASHES_PER_STEP: Final = 128
"""Blocks that are hashed in one step: about half a millisecond."""


class BadHintError(Exception):
    """A hint is not valid. ``path`` names the field, and the text says what is expected."""

    def __init__(self, path: str, expected: str) -> None:
        super().__init__(f"{path}: {expected}")
        self.path = path


class Hint(BaseModel):
    """What to do with the chunks of some tokens."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    token_ids: Annotated[InstanceOf[list[Any]], Field(min_length=1, max_length=MAX_TOKENS)] | None = None
    """The beginning of a prompt; None: the request's own tokens. The ids are checked when they are hashed."""
    prefetch: bool = False
    """Read chunks of farther tiers into memory."""
    store: bool = True
    """Whether to store what the request itself computes."""


def hint_of(params: Any) -> Hint | None:
    """Return the hint in a request's ``kv_transfer_params``; None: there is none. Ignores fields of other connectors.

    Raises BadHintError, which shows no values: they are a user's prompt.
    """
    if not isinstance(params, Mapping) or FIELD not in params:
        return None
    path = f"kv_transfer_params.{FIELD}"
    try:
        return Hint.model_validate(params[FIELD])
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        name = first["loc"][0] if first["loc"] else None
        if name in Hint.model_fields:
            raise BadHintError(f"{path}.{name}", first["msg"]) from None
        fields = ", ".join(Hint.model_fields)
        raise BadHintError(path, f"an object with some of {fields} is right, and nothing else") from None


class Hints:
    """Keeps hints and carries them out."""

    def __init__(self, manager: NixlOffloadManager, config: SchedulerOffloadConfig) -> None:
        """``config``: vLLM's, with the KV cache groups."""
        self._manager = manager
        self._config = config
        self._prompts: deque[tuple[int, Iterator[None]]] = deque()
        """Prompts to prefetch: their tokens, and what hashes some of them at each step and then begins the prefetch."""
        self._complained: set[str] = set()

    @property
    def has_pending(self) -> bool:
        """Whether ``step`` has something to do."""
        return bool(self._prompts)

    def arrived(self, request: Request, state: RequestOffloadState) -> None:
        """Take the hint of a new request, if it has one."""
        notes = notes_of(state.req_context)
        try:
            hint = hint_of(request.kv_transfer_params)
        except BadHintError as error:
            self._complain(error)
            return
        if hint is None:
            return
        notes.stores &= hint.store
        tokens = len(hint.token_ids) if hint.prefetch and hint.token_ids is not None else 0
        waiting_tokens = sum(waiting for waiting, _ in self._prompts) if tokens else 0
        if tokens and (len(self._prompts) >= MAX_PROMPTS or waiting_tokens + tokens > MAX_WAITING_TOKENS):
            self._count("any", "refused")
            return
        for name in ["prefetch"] * hint.prefetch + ["store"] * (not hint.store):
            self._count(name, "taken")
        allowed = self._manager.allowed_tiers(state.req_context)
        if hint.token_ids is not None and tokens:
            self._prompts.append((tokens, self._hash(hint.token_ids, state_like(state), allowed)))
        elif hint.prefetch and notes.loads:  # else its keys are worthless
            self._prefetch(state, allowed)

    def step(self) -> None:
        """Hash some of the oldest prompt."""
        if self._prompts and next(self._prompts[0][1], self) is self:
            self._prompts.popleft()

    def clear(self) -> None:
        """Forget all prompts that were not hashed yet."""
        self._prompts.clear()

    # Inside

    def _hash(self, token_ids: list[int], state: RequestOffloadState, allowed: frozenset[int] | None) -> Iterator[None]:
        """Hash token ids for ``state``, some blocks at a time; then read their chunks in the tiers ``allowed``."""
        piece_tokens = HASHES_PER_STEP * self._config.tokens_per_hash
        for begin in range(0, len(token_ids), piece_tokens):
            if begin:
                yield
            piece = token_ids[begin : begin + piece_tokens]
            if not all(type(token) is int and token >= 0 for token in piece):
                self._complain(BadHintError("token_ids", "whole numbers are right, 0 or more"))
                return
            state.req.append_output_token_ids(piece)
            state.update_offload_keys()
        self._prefetch(state, allowed)

    def _prefetch(self, state: RequestOffloadState, allowed: frozenset[int] | None) -> None:
        """Read chunks of the tiers ``allowed`` into memory."""
        state.update_offload_keys()
        moves, now_s = self._manager.catalog.moves, time.monotonic()
        groups = state.group_states
        for config, group in zip(self._config.kv_group_configs, groups, strict=True):
            window, tokens = config.sliding_window_size_in_chunks, config.tokens_per_chunk
            end_tokens = range(tokens, (len(group.offload_keys) + 1) * tokens, tokens)
            # As vLLM looks up: windows back to front. One chunk more, for a prompt's last token is always computed.
            looked_up = slice(None) if window is None else slice(None, -(window + 2), -1)
            chunks = cast("list[Key]", group.offload_keys[looked_up])
            moves.prefetch(chunks, end_tokens[looked_up], now_s, allowed, is_prefix=window is None, groups=len(groups))

    def _complain(self, error: BadHintError) -> None:
        self._count("any", "bad")
        if error.path not in self._complained:
            self._complained.add(error.path)
            logger.warning(
                'A hint was ignored: %s. Said once; vllm:nixl_offload_hints_total{result="bad"} counts them. '
                "docs/hints.md has the format",
                error,
            )

    def _count(self, hint: str, result: str) -> None:
        self._manager.metrics.add("hints", 1, hint, result)
