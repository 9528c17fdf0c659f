"""What a router may ask for with a request: our name in ``kv_transfer_params``. docs/hints.md is for users.

Threading: pure functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field, InstanceOf, ValidationError

FIELD: Final = "nixl_offload"
"""Where a hint is in ``kv_transfer_params``."""
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


def hint_of(params: Any) -> Hint | None:
    """Return the hint in a request's ``kv_transfer_params``; None: there is none. What is for others is passed over.

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
