"""Carries out the hints that come with requests: see ``hint_format`` for what they are.

Threading: the scheduler's thread. Prompts that come as token ids are hashed, and chunks retained and dropped, a piece
at a step, so that no step waits.
Failure: nothing raises because of a hint. A bad one is counted, and the first of its kind is logged.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import chain, groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Final, cast

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import RequestOffloadState
from vllm.v1.kv_offload.base import OffloadKey, ReqContext, RequestOffloadingContext

from nixl_offload.types import Key
from nixl_offload.vllm.adapters import AdapterUse
from nixl_offload.vllm.hint_format import BadHintError, Hint, hint_of
from nixl_offload.vllm.manager import NixlOffloadManager, Refused
from nixl_offload.vllm.vllm_internals import AdaptedRequestState, request_without_tokens

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import SchedulerOffloadConfig
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

MAX_PROMPTS: Final = 256
"""Prompts of hints that wait to be hashed."""
MAX_WAITING_TOKENS: Final = 4 << 20
"""Tokens of them: some 150 MB."""
HASHES_PER_STEP: Final = 128
"""Blocks of them that are hashed in one step: about half a millisecond of it."""
CHUNKS_PER_STEP: Final = 256
"""Chunks that are retained or dropped in one step: two milliseconds of it."""
MAX_WAITING_CHUNKS: Final = 1 << 18
"""Chunks that wait for that: 1,024 steps of them."""


class _Prompt:
    """Token ids of a hint, on their way to be hashed."""

    def __init__(self, hint: Hint, token_ids: list[int], carrier: RequestOffloadState) -> None:
        """``carrier``: the request that brought the hint."""
        self.hint = hint
        self.token_ids = token_ids
        self._carrier = carrier
        self._begin()

    def hash_some(self, tokens: int) -> bool:
        """Hash the next ``tokens``; True: that were all. Raises BadHintError where something is no token id."""
        if isinstance(self.status, AdaptedRequestState) and self.status.use != _use_of(self._carrier):
            self._begin()
        begin = self._request.num_tokens
        piece = self.token_ids[begin : begin + tokens]
        if not all(type(token) is int and token >= 0 for token in piece):
            raise BadHintError("token_ids", "whole numbers are right, 0 or more")
        self._request.append_output_token_ids(piece)
        self.status.update_offload_keys()
        return self._request.num_tokens >= len(self.token_ids)

    def _begin(self) -> None:
        """Begin with the first token. Keys stand for the carrier's adapter as far as its content is known now."""
        carrier = self._carrier
        self._request = request_without_tokens(carrier.req, f"hint-of-{carrier.req.request_id}")
        self.status = type(carrier)(
            config=carrier.config,
            req=self._request,
            req_context=ReqContext(self._request.request_id),
            offloading_context=RequestOffloadingContext(),
        )
        if isinstance(self.status, AdaptedRequestState):
            self.status.adapt(_use_of(carrier))


def _use_of(carrier: RequestOffloadState) -> AdapterUse | None:
    return carrier.use if isinstance(carrier, AdaptedRequestState) else None


class Hints:
    """The hints that were not carried out yet."""

    def __init__(self, manager: NixlOffloadManager, config: SchedulerOffloadConfig, clock: Callable[[], float]) -> None:
        """``config``: vLLM's, with the KV cache groups."""
        self._manager = manager
        self._config = config
        self._clock = clock
        self._prompts: deque[tuple[_Prompt, frozenset[int] | None]] = deque()
        """With the tiers that each may be loaded from."""
        self._tasks: deque[tuple[Callable[[list[OffloadKey]], None], OffloadKey]] = deque()
        """What is to be done with chunks, in this order."""
        self._at_end: dict[str, Hint] = {}
        """By request: what is to be done with its chunks when it has ended."""
        self._complained: set[str] = set()

    @property
    def has_pending(self) -> bool:
        """Whether ``step`` has something to do."""
        return bool(self._prompts or self._tasks)

    @property
    def waits_for_ends(self) -> bool:
        """Whether ``finished`` may have something to do."""
        return bool(self._at_end)

    def arrived(self, request: Request, status: RequestOffloadState) -> None:
        """Take the hint of a new request."""
        try:
            hint = hint_of(request.kv_transfer_params)
        except BadHintError as error:
            self._complain(error)
            return
        if hint is not None:
            self._take(hint, request, status)

    def step(self) -> None:
        """Go on with what has begun: hash some of the oldest prompt, and retain or drop some chunks."""
        if self._prompts:
            self._hash()
        tasks = [self._tasks.popleft() for _ in range(min(CHUNKS_PER_STEP, len(self._tasks)))]
        for act, alike in groupby(tasks, itemgetter(0)):
            act([key for _, key in alike])

    def finished(self, request_id: str, status: RequestOffloadState | None) -> None:
        """A request has ended: begin with what was to be done then. ``status``: with all of its chunks."""
        hint = self._at_end.pop(request_id, None)
        if hint is not None and status is not None:
            self._carry_out(hint, status, None)

    def clear(self) -> None:
        """Carry out nothing of what has come so far."""
        self._prompts.clear()
        self._tasks.clear()
        self._at_end.clear()

    # Inside

    def _take(self, hint: Hint, request: Request, status: RequestOffloadState) -> None:
        has_worthless_keys = status.req_context.get_state(Refused) is not None
        if not has_worthless_keys and (not hint.store or (hint.token_ids is None and hint.drop_from is not None)):
            status.req_context.set_state(Refused(may_load=True))
        tokens = len(hint.token_ids or ())
        waiting_tokens = sum(len(prompt.token_ids) for prompt, _ in self._prompts) if tokens else 0
        if tokens and (len(self._prompts) >= MAX_PROMPTS or waiting_tokens + tokens > MAX_WAITING_TOKENS):
            self._manager.count("hints", "any", "refused")
            return
        for name in hint.names:
            self._manager.count("hints", name, "taken")
        allowed = self._manager.allowed_tiers(status.req_context)
        if hint.token_ids is not None:
            self._prompts.append((_Prompt(hint, hint.token_ids, status), allowed))
        elif not has_worthless_keys:
            if hint.prefetch:
                self._prefetch(self._keys(status), allowed)
            if hint.retain_s is not None or hint.drop_from is not None:
                self._at_end[request.request_id] = hint

    def _hash(self) -> None:
        prompt, allowed = self._prompts[0]
        try:
            if not prompt.hash_some(HASHES_PER_STEP * self._config.tokens_per_hash):
                return
        except BadHintError as error:
            self._complain(error)
        else:
            self._carry_out(prompt.hint, prompt.status, allowed)
        self._prompts.popleft()

    def _carry_out(self, hint: Hint, status: RequestOffloadState, allowed: frozenset[int] | None) -> None:
        keys = self._keys(status)
        if hint.token_ids is not None and hint.prefetch:
            self._prefetch(keys, allowed)
        if hint.retain_s is not None:
            retain = partial(self._retain, hint.retain_s, self._clock())
            self._begin(retain, list(chain.from_iterable(keys)))
        if hint.drop_from is not None:
            for config, of_group in zip(self._config.kv_group_configs, keys, strict=True):
                beyond = of_group[hint.drop_from // config.tokens_per_chunk :]
                self._begin(self._manager.drop, beyond[::-1])  # the end first: what is left is a prefix

    def _begin(self, act: Callable[[list[OffloadKey]], None], keys: list[OffloadKey]) -> None:
        if len(self._tasks) + len(keys) > MAX_WAITING_CHUNKS:
            self._manager.count("hints", "any", "refused")
        else:
            self._tasks += [(act, key) for key in keys]

    def _prefetch(self, keys: list[list[OffloadKey]], allowed: frozenset[int] | None) -> None:
        now_s = self._clock()
        for config, of_group in zip(self._config.kv_group_configs, keys, strict=True):
            window, tokens = config.sliding_window_size_in_chunks, config.tokens_per_chunk
            end_tokens = range(tokens, (len(of_group) + 1) * tokens, tokens)
            # Looked up as vLLM does, windows back to front. One more: a prompt's last token is always computed.
            looked_up = slice(None) if window is None else slice(None, -(window + 2), -1)
            chunks = cast("list[Key]", of_group[looked_up])
            self._manager.catalog.prefetch(
                chunks, end_tokens[looked_up], now_s, allowed, is_prefix=window is None, groups=len(keys)
            )

    def _retain(self, retain_s: float, since_s: float, keys: list[OffloadKey]) -> None:
        self._manager.catalog.retain([Key(key) for key in keys], retain_s, since_s)

    def _keys(self, status: RequestOffloadState) -> list[list[OffloadKey]]:
        """Return the chunks of a request by KV cache group."""
        status.update_offload_keys()
        return [group.offload_keys[:] for group in status.group_states]

    def _complain(self, error: BadHintError) -> None:
        self._manager.count("hints", "any", "bad")
        if error.path not in self._complained:
            self._complained.add(error.path)
            logger.warning(
                'A hint was ignored: %s. Said once; vllm:nixl_offload_hints_total{result="bad"} counts them. '
                "docs/hints.md has the format",
                error,
            )
