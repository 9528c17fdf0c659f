"""What a router may ask for with a request: our names in ``kv_transfer_params``, and in vLLM's envelope of hints.

Threading: pure functions. docs/hints.md is for users.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field, InstanceOf, ValidationError

if TYPE_CHECKING:
    from vllm.v1.kv_hints import KvHintsEnvelope

FIELD: Final = "nixl_offload"
"""Where hints are in ``kv_transfer_params``."""
ACTION_TYPE: Final = "nixl_offload.hints"
"""``action_type`` of our actions in an envelope, whose payload is what ``FIELD`` has in ``kv_transfer_params``."""
ACTION_MAJOR: Final = "1"
"""Of ``action_version``."""
MAX_ACTIONS: Final = 16
"""Of ours in one envelope."""
MAX_TOKENS: Final = 1 << 20
MAX_RETAIN_S: Final = 86_400.0


class BadHintError(Exception):
    """A hint is not what it should be. ``path`` names the place, and the text says what would be right."""

    def __init__(self, path: str, expected: str) -> None:
        super().__init__(f"{path}: {expected}")
        self.path = path


class Hint(BaseModel):
    """What is to be done with the chunks of some tokens."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    token_ids: Annotated[InstanceOf[list[Any]], Field(min_length=1, max_length=MAX_TOKENS)] | None = None
    """Of the beginning of a prompt; None: the request's own tokens. What they are is checked when they are hashed."""
    prefetch: bool = False
    """Read into memory what a farther tier has."""
    retain_s: float | None = Field(None, ge=0, le=MAX_RETAIN_S)
    """Do not evict for so long; 0 ends that."""
    store: bool = True
    """Whether to store what the request itself computes."""
    drop_from: int | None = Field(None, ge=0)
    """Give up the chunks that reach beyond this token."""

    @property
    def names(self) -> list[str]:
        """What it asks for, in metrics."""
        asked = {
            "prefetch": self.prefetch,
            "retain": self.retain_s is not None,
            "store": not self.store,
            "drop": self.drop_from is not None,
        }
        return [name for name, is_asked in asked.items() if is_asked]


def hints_of(params: Any, envelope: KvHintsEnvelope | None) -> Iterator[Hint | BadHintError]:
    """Yield the hints for us in a request's ``kv_transfer_params`` and ``kv_hints``; what is bad as an exception.

    What is for others is passed over.
    """
    if isinstance(params, Mapping) and FIELD in params:
        yield _checked(params[FIELD], f"kv_transfer_params.{FIELD}")
    actions = getattr(envelope, "actions", None)  # whoever drives the engine within this process may pass anything
    ours = [action for action in actions if _is_ours(action)] if isinstance(actions, list) else ()
    for number, action in enumerate(ours):
        if number >= MAX_ACTIONS:
            yield BadHintError("kv_hints.actions", f"at most {MAX_ACTIONS} of type {ACTION_TYPE}")
            return
        if str(action.action_version).partition(".")[0] != ACTION_MAJOR:
            yield BadHintError("kv_hints.actions.action_version", f"this version knows {ACTION_TYPE} {ACTION_MAJOR}.x")
        else:
            yield _checked(getattr(action, "payload", None), "kv_hints.actions.payload")


def _is_ours(action: object) -> bool:
    return getattr(action, "action_type", None) == ACTION_TYPE and hasattr(action, "action_version")


def _checked(raw: Any, path: str) -> Hint | BadHintError:
    """Values are not shown: they are a user's prompt."""
    try:
        hint = Hint.model_validate(raw)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        name = first["loc"][0] if first["loc"] else None
        if name in Hint.model_fields:
            return BadHintError(f"{path}.{name}", first["msg"])
        return BadHintError(path, f"an object with some of {', '.join(Hint.model_fields)} is right, and nothing else")
    if hint.drop_from is not None and (hint.prefetch or hint.retain_s):
        return BadHintError(f"{path}.drop_from", "cannot go with prefetch or retain_s, which keep the same chunks")
    return hint
