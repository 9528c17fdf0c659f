"""The closed tree of errors. Foreign errors are translated into these once, at the edge, keeping the cause.

Threading: exceptions only; no state.
"""

from __future__ import annotations


class NixlOffloadError(Exception):
    """Root of everything this package raises on purpose."""


class ConfigError(NixlOffloadError):
    """A config file is wrong. The message names file, YAML path, value, and what is allowed."""


class NotSupportedError(NixlOffloadError):
    """This build, platform or vLLM version cannot do it; the message names what can."""


class NamespaceError(NixlOffloadError):
    """The engine's identity cannot be fingerprinted (a field is missing or has the wrong type)."""


class FormatError(NixlOffloadError):
    """Stored bytes do not belong to the key, or are damaged: identity, length or checksum disagree.

    ``reason`` is one short machine-readable word: ``magic``, ``version``, ``header_checksum``,
    ``namespace``, ``key``, ``length``, ``blocks``, ``checksum``, ``authentication``.
    """

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class LayoutError(NixlOffloadError):
    """A job's block ids, sizes or offsets do not fit the chunk arithmetic or the registered regions."""


class IndexStateError(NixlOffloadError):
    """The index's table has no such transition. Always a bug in the caller, never bad data."""


class TierError(NixlOffloadError):
    """A tier cannot do what was asked now. ``cause`` groups warnings: one clear line per cause.

    ``cause`` is one of ``full``, ``readonly``, ``missing``, ``locked``, ``permission``, ``unreachable``, ``files`` (the
    process has too many open files; the tier is not to blame), ``io``.
    """

    def __init__(self, message: str, *, cause: str) -> None:
        super().__init__(message)
        self.cause = cause


class MoverError(NixlOffloadError):
    """A mover refused or failed a transfer. Names the mover and, where known, the target."""


class MoverUnavailableError(MoverError):
    """This mover cannot run on this machine; the message says why."""


class StoreError(NixlOffloadError):
    """A store (a bucket, a shared directory) did not do what was asked. ``cause`` is one word for the reason.

    Every store: ``missing`` (no such object), ``short`` (the object ends before the requested range), ``full``,
    ``unreachable`` (no connection, or it broke; the directory is gone), ``io`` (anything else). Buckets also:
    ``denied``, ``timeout``, ``throttled`` (asked to slow down), ``server`` (5xx). Directories also: ``readonly``,
    ``permission``, ``files`` (the process has too many open files).
    """

    def __init__(self, message: str, *, cause: str) -> None:
        super().__init__(message)
        self.cause = cause
