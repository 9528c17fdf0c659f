"""Whether the ranks still have the weights that the namespace stands for.

vLLM does not tell a connector of new weights. It resets the connector's cache when it sleeps, pauses or is asked to,
and its own prefix cache when a weight loader asks for it. After each reset the ranks are asked for a digest of their
weights in memory. Nothing is stored or loaded until all have answered.

Threading: the scheduler's thread. Reads no clock: time is passed in.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from enum import Enum

from nixl_offload.vllm.identity import digest_of_ranks
from nixl_offload.vllm.messages import WeightsAnswer

logger = logging.getLogger(__name__)

ANSWER_WAIT_S = 30.0
"""How long a request waits for the ranks' answers. A digest of 10 GB takes some 40 ms on a GPU, 0.4 s on a CPU."""


class Trust(Enum):
    """What is known about the weights in memory."""

    SETTLED = "settled"
    """They are the weights of the namespace."""
    ASKED = "asked"
    """They may have changed; the ranks are asked before the next request is served."""
    BLOCKED = "blocked"
    """They have changed, or may have, and vLLM's prefix cache may still hold blocks of the old weights."""


class WeightsCheck:
    """Asks the ranks and decides. ``trust`` is the current result."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self.trust = Trust.SETTLED
        self.generation: str | None = None
        """Identifies the current weights; None: those of the start."""
        self._first: tuple[str | None, ...] = ()
        self._answers: dict[int, str | None] = {}
        self._question = 0
        self._wanted_s: float | None = None
        """When the wait for answers began; None: no weights were in memory yet."""
        self._is_sent = False
        self._seen_cache: object = self
        """vLLM's prefix cache at the last look; ``self`` before the first."""
        self._clean_cache: object = None
        """The prefix cache whose blocks all came from ``generation``, as of the last answers."""

    def start(self, digests: Sequence[str | None]) -> None:
        """Take the ranks' digests at start, in order."""
        self._first = tuple(digests)

    def look(self, prefix_cache: object) -> None:
        """Notice a reset of vLLM's prefix cache. Called before a request is looked up, and in every step."""
        if self._seen_cache is self:
            self._clean_cache = prefix_cache
        elif prefix_cache is not self._seen_cache:
            self.suspect()
        self._seen_cache = prefix_cache

    def suspect(self) -> None:
        """Ask the ranks again: the weights may have changed."""
        self.trust, self._answers = Trust.ASKED, {}
        self._question += 1
        self._wanted_s, self._is_sent = None, False

    def want(self, now_s: float) -> None:
        """Ask, if that is due. Call it before computing and before a lookup, when the weights are in memory."""
        if self.trust is Trust.ASKED:
            self._wanted_s = now_s if self._wanted_s is None else self._wanted_s
            if now_s - self._wanted_s > ANSWER_WAIT_S:
                self._block("the ranks do not say which weights they have")

    def take_question(self) -> int:
        """Return, once, the number of the question to send to all ranks with this step; 0: none."""
        if self._wanted_s is None or self._is_sent:
            return 0
        self._is_sent = True
        return self._question

    def hear(self, answers: Mapping[int, WeightsAnswer]) -> bool:
        """Take answers of ranks. Returns whether ``generation`` has changed."""
        self._answers.update({rank: said.digest for rank, said in answers.items() if said.question == self._question})
        if self.trust is not Trust.ASKED or len(self._answers) < self._world_size:
            return False
        if not self._first:
            self.suspect()  # the digests of the start have not arrived yet
            return False
        digests = tuple(self._answers[rank] for rank in range(self._world_size))
        # A rank without a digest gets a random name, so nothing is shared.
        generation = None if digests == self._first and None not in digests else digest_of_ranks(digests)
        if generation == self.generation:
            self.trust, self._clean_cache = Trust.SETTLED, self._seen_cache
            return False
        if self._clean_cache is self._seen_cache:
            self._block("the weights were replaced")
            return False
        self.trust, self._clean_cache = Trust.SETTLED, self._seen_cache
        self.generation = generation
        logger.info(
            "The weights are %s: what was computed with others is not served, and stays for those who have them",
            "those of the start again" if generation is None else f"others now ({generation[:12]})",
        )
        return True

    def _block(self, why: str) -> None:
        self.trust = Trust.BLOCKED
        logger.warning(
            "Nothing is stored or loaded until vLLM's prefix cache is reset (POST /reset_prefix_cache): %s, and it may "
            "hold blocks of the old ones",
            why,
        )
