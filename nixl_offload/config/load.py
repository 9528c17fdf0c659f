"""From a file, a mapping or vLLM's extra config to a checked ``Config``, and from a ``Config`` to vLLM's JSON.

Threading: pure functions but for reading the file; safe anywhere.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from nixl_offload.config.document import Path, parse_yaml
from nixl_offload.config.problems import find_problems, render
from nixl_offload.config.rules import Problem, show_value
from nixl_offload.config.schema import Config
from nixl_offload.errors import ConfigError
from nixl_offload.units import format_size

CONNECTOR_NAME = "NixlOffloadConnector"
MAX_BYTES = 1 << 20
"""Of a file. Reading YAML takes half a second per MiB, and vLLM reads the file several times."""


def load_config(path: str | os.PathLike[str]) -> Config:
    """Read and check the YAML file at ``path``.

    Raises ConfigError, one line per problem: file and line, YAML path, the value, what is allowed.
    """
    source = os.fspath(path)
    try:
        with open(source, "rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ConfigError(
                f"{source}: is larger than {format_size(MAX_BYTES)}, which no config is; is it the right file?"
            )
        text = content.decode()
    except OSError as exc:
        raise ConfigError(f"{source}: cannot be read: {exc.strerror or exc}") from exc
    except UnicodeDecodeError as exc:
        raise ConfigError(f"{source}: is not UTF-8 text (byte {exc.start})") from exc
    except ValueError as exc:  # a NUL byte or half a surrogate pair: no path has them
        raise ConfigError(f"{show_value(source)}: cannot be read: {exc}") from exc
    document = parse_yaml(text, source)
    return _check(document.data, source, document.lines)


def parse_config(mapping: Mapping[str, Any], source: str = "inline") -> Config:
    """Check plain data as the YAML would hold it; ``source`` names it in errors. Raises ConfigError."""
    return _check(mapping, source, {})


def from_extra_config(extra: Mapping[str, Any]) -> Config:
    """Read what ``kv_connector_extra_config["config"]`` holds: the path of a file, or an inline mapping.

    Raises ConfigError, also when the key is missing.
    """
    value = extra.get("config")
    if isinstance(value, str | os.PathLike):
        return load_config(value)
    if isinstance(value, Mapping):
        return parse_config(value, "kv_connector_extra_config.config")
    found = "is missing" if value is None else f"{show_value(value)} is refused"
    raise ConfigError(
        f"kv_connector_extra_config.config: {found}; allowed: the path of a YAML file, or its content as a mapping"
    )


def merge_extra_config(extra: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """Return ``extra`` with the keys of the file's ``vllm:`` added, so that the file alone is enough.

    Raises ConfigError when both name a key and disagree.
    """
    for key, value in config.vllm.items():
        if key in extra and extra[key] != value:
            raise ConfigError(
                f"vllm.{key}: the config says {show_value(value)}, kv_connector_extra_config says "
                f"{show_value(extra[key])}; say it in one place"
            )
    return {**extra, **config.vllm}


def kv_transfer_config(config: Config, reference: str | Mapping[str, Any]) -> dict[str, Any]:
    """Return what ``--kv-transfer-config`` takes. ``reference`` is the path of the file, or its content."""
    return {
        "kv_connector": CONNECTOR_NAME,
        "kv_role": "kv_both",
        "kv_load_failure_policy": config.on_load_failure,
        "kv_connector_extra_config": {"config": reference, **config.vllm},
    }


def beside(transfer: Mapping[str, Any], others: Sequence[str]) -> dict[str, Any]:
    """Return what ``--kv-transfer-config`` takes for ours, by ``kv_transfer_config``, and connectors before it.

    ``others``: their class names in vLLM, such as NixlConnector. Loads come from the first that has some, so ours is
    last. The policy for failed loads counts at the outermost connector only. All must agree on one KV cache layout,
    and ours goes by theirs.
    """
    ours = {key: value for key, value in transfer.items() if key != "kv_load_failure_policy"}
    ours["kv_connector_extra_config"] = {**transfer["kv_connector_extra_config"], "block_outermost": False}
    connectors = [{"kv_connector": name, "kv_role": "kv_both"} for name in others]
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": transfer["kv_load_failure_policy"],
        "kv_connector_extra_config": {"connectors": [*connectors, ours]},
    }


def blocks_per_chunk(chunk_tokens: int, block_tokens: int) -> int:
    """Return how many of vLLM's blocks make a chunk: as many as ``chunk_tokens`` need, so it may hold more tokens.

    Raises ConfigError when ``block_tokens`` is no block size.
    """
    if block_tokens < 1:
        raise ConfigError(f"vLLM's block size is {block_tokens} tokens; allowed: 1 or more")
    return -(-chunk_tokens // block_tokens)


def _check(data: object, source: str, lines: Mapping[Path, int]) -> Config:
    if data is None:
        data = {}
    if not isinstance(data, Mapping):
        raise ConfigError(f"{source}: {show_value(data)} is not a mapping; allowed: fields such as tenant and tiers")
    config: Config | None = None
    error: ValidationError | None = None
    try:
        config = Config.model_validate(data)
    except ValidationError as exc:
        error = exc
    problems: list[Problem] = find_problems(data, error)
    if problems or config is None:
        # "from None": pydantic's own text would repeat the values that the message withholds.
        raise ConfigError(render(problems, source, lines)) from None
    return config
