"""Hints: a router's wishes in a request's ``kv_transfer_params``, and how they are carried out. docs/hints.md is for
users.

Threading: the scheduler's thread. Each step hashes, retains and drops a limited number of blocks and chunks, so that no
step waits.
Failure: a hint never raises. A bad one is counted, and the first of its kind is logged.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import chain, groupby
from operator import itemgetter
from typing import Annotated, Any, Final, cast

from pydantic import BaseModel, ConfigDict, Field, InstanceOf, ValidationError
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    RequestOffloadState,
    SchedulerOffloadConfig,
)
from vllm.v1.kv_offload.base import OffloadKey
from vllm.v1.request import Request

from nixl_offload.types import Key
from nixl_offload.vllm.manager import NixlOffloadManager
from nixl_offload.vllm.vllm_scheduler import notes_of, state_like

logger = logging.getLogger(__name__)

FIELD: Final = "nixl_offload"
"""The field of ``kv_transfer_params`` that holds a hint."""
MAX_TOKENS: Final = 1 << 20
MAX_RETAIN_S: Final = 86_400.0
MAX_PROMPTS: Final = 256
"""Prompts of hints that wait to be hashed."""
MAX_WAITING_TOKENS: Final = 4 << 20
"""Tokens of these prompts: some 150 MB."""
HASHES_PER_STEP: Final = 128
"""Blocks that are hashed in one step: about half a millisecond."""
CHUNKS_PER_STEP: Final = 256
"""Chunks that are retained or dropped in one step: two milliseconds."""
MAX_WAITING_CHUNKS: Final = 1 << 18
"""Chunks that wait to be retained or dropped: 1,024 steps."""


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
    retain_s: float | None = Field(None, ge=0, le=MAX_RETAIN_S)
    """Do not evict the chunks for this time; 0 ends retention."""
    store: bool = True
    """Whether to store what the request itself computes."""
    drop_from: int | None = Field(None, ge=0)
    """Drop the chunks that reach beyond this token."""

    @property
    def names(self) -> list[str]:
        """The wishes in it, by their names in metrics."""
        asked = {
            "prefetch": self.prefetch,
            "retain": self.retain_s is not None,
            "store": not self.store,
            "drop": self.drop_from is not None,
        }
        return [name for name, is_asked in asked.items() if is_asked]


def hint_of(params: Any) -> Hint | None:
    """Return the hint in a request's ``kv_transfer_params``; None: there is none. Ignores fields of other connectors.

    Raises BadHintError, which shows no values: they are a user's prompt.
    """
    if not isinstance(params, Mapping) or FIELD not in params:
        return None
    path = f"kv_transfer_params.{FIELD}"
    try:
        hint = Hint.model_validate(params[FIELD])
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        name = first["loc"][0] if first["loc"] else None
        if name in Hint.model_fields:
            raise BadHintError(f"{path}.{name}", first["msg"]) from None
        fields = ", ".join(Hint.model_fields)
        raise BadHintError(path, f"an object with some of {fields} is right, and nothing else") from None
    if hint.drop_from is not None and (hint.prefetch or hint.retain_s):
        raise BadHintError(f"{path}.drop_from", "cannot go with prefetch or retain_s, which keep the same chunks")
    return hint


class Hints:
    """Keeps hints and carries them out."""

    def __init__(self, manager: NixlOffloadManager, config: SchedulerOffloadConfig) -> None:
        """``config``: vLLM's, with the KV cache groups."""
        self._manager = manager
        self._config = config
        self._prompts: deque[tuple[int, Iterator[None]]] = deque()
        """Hints with token ids: how many, and what hashes some of them at each step and then carries out the hint."""
        self._tasks: deque[tuple[Callable[[list[OffloadKey]], None], OffloadKey]] = deque()
        """What to do with which chunk, in this order."""
        self._at_end: dict[str, Hint] = {}
        """By request: what to do with its chunks when it has ended."""
        self._complained: set[str] = set()

    @property
    def has_pending(self) -> bool:
        """Whether ``step`` has something to do."""
        return bool(self._prompts or self._tasks)

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
        if not hint.store or (hint.token_ids is None and hint.drop_from is not None):
            notes.stores = False
        tokens = 0 if hint.token_ids is None else len(hint.token_ids)
        waiting_tokens = sum(waiting for waiting, _ in self._prompts) if tokens else 0
        if tokens and (len(self._prompts) >= MAX_PROMPTS or waiting_tokens + tokens > MAX_WAITING_TOKENS):
            self._count("any", "refused")
            return
        for name in hint.names:
            self._count(name, "taken")
        allowed = self._manager.allowed_tiers(state.req_context)
        if hint.token_ids is not None:
            self._prompts.append((tokens, self._hash(hint, hint.token_ids, state_like(state), allowed)))
        elif notes.loads:  # else its keys are worthless
            if hint.prefetch:
                self._prefetch(self._keys(state), allowed)
            if hint.retain_s is not None or hint.drop_from is not None:
                self._at_end[request.request_id] = hint

    def step(self) -> None:
        """Hash some of the oldest prompt, and retain or drop the next chunks."""
        if self._prompts and next(self._prompts[0][1], self) is self:
            self._prompts.popleft()
        tasks = [self._tasks.popleft() for _ in range(min(CHUNKS_PER_STEP, len(self._tasks)))]
        for act, alike in groupby(tasks, itemgetter(0)):
            act([key for _, key in alike])

    def finished(self, request_id: str, state: RequestOffloadState | None) -> None:
        """Begin what a hint wants at the end of this request. ``state``: its state, with all of its chunks."""
        hint = self._at_end.pop(request_id, None)
        if hint is not None and state is not None:
            self._retain_or_drop(hint, self._keys(state))

    def clear(self) -> None:
        """Forget all hints that were not carried out yet."""
        self._prompts.clear()
        self._tasks.clear()
        self._at_end.clear()

    # Inside

    def _hash(
        self, hint: Hint, token_ids: list[int], state: RequestOffloadState, allowed: frozenset[int] | None
    ) -> Iterator[None]:
        """Hash token ids for ``state``, some blocks at a time; after the last of them, carry out the hint. ``allowed``:
        the tiers that they may be loaded from.
        """
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
        keys = self._keys(state)
        if hint.prefetch:
            self._prefetch(keys, allowed)
        self._retain_or_drop(hint, keys)

    def _retain_or_drop(self, hint: Hint, keys: list[list[OffloadKey]]) -> None:
        if hint.retain_s is not None:
            retain = partial(self._retain, hint.retain_s, time.monotonic())
            self._begin(retain, list(chain.from_iterable(keys)))
        if hint.drop_from is not None:
            for config, of_group in zip(self._config.kv_group_configs, keys, strict=True):
                beyond = of_group[hint.drop_from // config.tokens_per_chunk :]
                self._begin(self._manager.drop, beyond[::-1])  # the end first: what is left is a prefix

    def _begin(self, act: Callable[[list[OffloadKey]], None], keys: list[OffloadKey]) -> None:
        if len(self._tasks) + len(keys) > MAX_WAITING_CHUNKS:
            self._count("any", "refused")
        else:
            self._tasks += [(act, key) for key in keys]

    def _prefetch(self, keys: list[list[OffloadKey]], allowed: frozenset[int] | None) -> None:
        """Read chunks of the tiers ``allowed`` into memory."""
        moves, now_s = self._manager.catalog.moves, time.monotonic()
        for config, of_group in zip(self._config.kv_group_configs, keys, strict=True):
            window, tokens = config.sliding_window_size_in_chunks, config.tokens_per_chunk
            end_tokens = range(tokens, (len(of_group) + 1) * tokens, tokens)
            # As vLLM looks up: windows back to front. One chunk more, for a prompt's last token is always computed.
            looked_up = slice(None) if window is None else slice(None, -(window + 2), -1)
            chunks = cast("list[Key]", of_group[looked_up])
            moves.prefetch(chunks, end_tokens[looked_up], now_s, allowed, is_prefix=window is None, groups=len(keys))

    def _retain(self, retain_s: float, since_s: float, keys: list[OffloadKey]) -> None:
        self._manager.catalog.retention.retain(cast("list[Key]", keys), retain_s, since_s)

    def _keys(self, state: RequestOffloadState) -> list[list[OffloadKey]]:
        """Return the chunks of a request by KV cache group."""
        state.update_offload_keys()
        return [group.offload_keys[:] for group in state.group_states]

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
