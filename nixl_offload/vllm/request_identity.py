"""Tells which requests have keys that name content alone.

The keys of all others mean nothing outside of the process, or whatever a user chose: such requests are neither stored
nor loaded.

Threading: pure functions, called by the scheduler's thread.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

_CONTENT_DIGEST: Final = re.compile(r"[0-9a-f]{64}|[0-9a-f]{128}")
"""vLLM's digest of an image, a sound or a video: BLAKE3, SHA-256 or SHA-512."""


def has_lasting_keys(request: Request, *, counts_media: bool = False) -> bool:
    """Whether equal keys mean equal inputs in every process.

    vLLM names an image by a digest of its content, or by the ``uuid`` that the user gave, or (``counts_media``) by a
    number that it counts up; the name, behind that of a LoRA adapter, is in the block hashes. A uuid that looks like
    such a digest cannot be told from one: of 64 hex digits, or one that vLLM digests because the request brings
    ``mm_processor_kwargs`` or ``media_io_kwargs``.
    """
    if not request.mm_features:
        return True
    adapter = f"{request.lora_request.lora_name}:" if request.lora_request is not None else ""
    return not counts_media and all(
        _CONTENT_DIGEST.fullmatch(feature.identifier.removeprefix(adapter)) is not None
        for feature in request.mm_features
    )


def counts_media(vllm_config: VllmConfig) -> bool:
    """Whether vLLM numbers images instead of hashing them: without prefix caching and without a processor cache."""
    multimodal = vllm_config.model_config.multimodal_config
    return (
        multimodal is not None
        and not multimodal.mm_processor_cache_gb
        and not vllm_config.cache_config.enable_prefix_caching
    )


def sentence_about_media(vllm_config: VllmConfig) -> str | None:
    """Return a sentence for the log at start about requests with media; None for a model that takes text alone."""
    if vllm_config.model_config.multimodal_config is None:
        return None
    if counts_media(vllm_config):
        return (
            "Requests with images, video or sound are neither stored nor loaded: without prefix caching and with "
            "--mm-processor-cache-gb 0 vLLM names them by a counter of the process"
        )
    return (
        "Requests whose images, video or sound are named by a uuid of the user's are neither stored nor loaded: "
        "only digests of the content name them for every server"
    )
