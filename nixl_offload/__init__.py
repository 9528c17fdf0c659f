"""nixl-offload: keeps vLLM's KV cache on files and in buckets, and brings it back through NIXL."""

from __future__ import annotations

__version__ = "0.1.0"
