"""What ``nixl-offload check`` says of vLLM's block hashes: will a restart, or another server, find what was stored?

Threading: pure functions.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from nixl_offload.cli.check.lines import Line, ok, warning, wrong
from nixl_offload.config import Config, MemoryConfig, blocks_per_chunk
from nixl_offload.errors import ConfigError

_STEADY: Final = ("sha256", "sha256_cbor")
_SEEDED: Final = ("xxhash", "xxhash_cbor")
_SAY: Final = "say how the server is started: nixl-offload check --vllm-args '...'"


class ServerArguments(NamedTuple):
    """What of the server's command line matters here."""

    hash_algorithm: str | None
    """None: not said, vLLM's default."""
    prefix_caching: bool
    block_tokens: int | None
    given: bool
    """Whether anybody told us the arguments at all."""


def read_server_arguments(words: Sequence[str] | None) -> ServerArguments:
    """Read what follows ``vllm serve``; None: not given. Raises ConfigError when a value is no value."""
    parser = _Quiet(add_help=False, allow_abbrev=False)
    parser.add_argument("--prefix-caching-hash-algo", "--prefix_caching_hash_algo")
    parser.add_argument("--enable-prefix-caching", "--enable_prefix_caching", action="store_true", default=True)
    parser.add_argument("--no-enable-prefix-caching", dest="enable_prefix_caching", action="store_false")
    parser.add_argument("--block-size", "--block_size", type=int)
    found, _ = parser.parse_known_args([] if words is None else [*words])
    return ServerArguments(
        found.prefix_caching_hash_algo, found.enable_prefix_caching, found.block_size, words is not None
    )


def hash_lines(config: Config, server: ServerArguments, environment: Mapping[str, str]) -> Iterator[Line]:
    """Yield whether hashes last, and whether a chunk is a whole number of blocks."""
    yield _algorithm_line(config, server, environment.get("PYTHONHASHSEED"))
    if not server.prefix_caching and not config.serve_without_prefix_caching:
        words = "off (--no-enable-prefix-caching): nothing is stored or loaded"
        yield warning("prefix caching", words, "start the server without --no-enable-prefix-caching")
    if server.block_tokens is not None:
        try:
            blocks = blocks_per_chunk(config.chunk_tokens, server.block_tokens)
        except ConfigError as error:
            nearest = str(error).rpartition("nearest: ")[2]
            yield wrong("chunk_tokens", str(error), f"chunk_tokens: {nearest.partition(' ')[0]}")
        else:
            yield ok("chunk_tokens", f"{config.chunk_tokens} are {blocks} of vLLM's blocks of {server.block_tokens}")


def _algorithm_line(config: Config, server: ServerArguments, seed: str | None) -> Line:
    name = "hash algorithm"
    algorithm = server.hash_algorithm
    here = {None: "unset", "": "empty"}.get(seed, seed)
    found = f"found by every server with the same PYTHONHASHSEED (here: {here})"
    if all(isinstance(tier, MemoryConfig) for tier in config.tiers):
        return ok(name, "any will do: with a memory tier alone nothing outlives the server")
    if algorithm is None:
        words = f"sha256, vLLM's default: {found}"
        return ok(name, words if server.given else f"{words}. If yours names another, {_SAY}")
    if algorithm in _STEADY:
        return ok(name, f"{algorithm}: {found}")
    if algorithm not in _SEEDED:
        mend = "--prefix-caching-hash-algo sha256"
        return wrong(name, f"vLLM knows no {algorithm!r}; it has {', '.join(_STEADY + _SEEDED)}", mend)
    if seed:
        return ok(name, f"{algorithm}: {found}")
    words = f"{algorithm} without PYTHONHASHSEED: hashes differ in every process, so nothing is stored or loaded"
    return wrong(name, words, "export PYTHONHASHSEED=0 for every server, or --prefix-caching-hash-algo sha256")


class _Quiet(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]  # it raises instead of leaving
        raise ConfigError(f"--vllm-args: {message}")
