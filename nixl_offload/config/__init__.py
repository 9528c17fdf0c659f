"""From a file, a mapping or vLLM's extra config to a checked ``Config``, and from a ``Config`` to vLLM's JSON.

The only reader of YAML in the package: strict, each error a sentence with file and line. Values of fields that look
like credentials are never repeated in an error. Threading: pure functions but for reading the file; safe anywhere.
"""

from __future__ import annotations

import difflib
import functools
import operator
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from nixl_offload.config.schema import (
    ALLOWED,
    TIER_MODELS,
    AuthenticateOptions,
    Config as Config,
    DirectoryConfig as DirectoryConfig,
    LookupOptions,
    MemoryConfig as MemoryConfig,
    S3Config as S3Config,
    ShardCut as ShardCut,
    SharedConfig as SharedConfig,
    SharedDirConfig as SharedDirConfig,
    SlabConfig as SlabConfig,
    StoredConfig as StoredConfig,
    TierConfig as TierConfig,
    VllmOptions,
)
from nixl_offload.errors import ConfigError
from nixl_offload.units import format_size

Path = tuple[str | int, ...]
"""Where a value stands: ``("tiers", 1, "capacity")``."""
CONNECTOR_NAME = "NixlOffloadConnector"
MAX_BYTES = 1 << 20
"""Of a file. Reading YAML takes half a second per MiB, and vLLM reads the file several times."""

_CREDENTIAL: Final = re.compile(
    r"(access|secret|api|private|account).?key|secret|passw|credential|(session|auth|security|bearer).?token|^token$"
    r"|^user(name)?$",
    re.IGNORECASE,
)
_USERINFO: Final = re.compile(r"(?<=://)\S*@|[^\s'\"/]*@")
_SHOWN_CHARS: Final = 80
_MODELS: Final = TIER_MODELS | {"authenticate": AuthenticateOptions, "lookup": LookupOptions, "shards": ShardCut}


def load_config(path: str | os.PathLike[str]) -> Config:
    """Read and check the YAML file at ``path``.

    Raises ConfigError, one line per problem: file and line, YAML path, the value, what is allowed.
    """
    source = os.fspath(path)
    try:
        with open(source, "rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ConfigError(f"{source}: is larger than {format_size(MAX_BYTES)}, as no config is; the right file?")
        text = content.decode()
    except (OSError, ValueError) as exc:  # ValueError: no UTF-8, or a path with a NUL byte or half a surrogate pair
        where = source if source.isprintable() else repr(source)
        raise ConfigError(f"{where}: cannot be read: {getattr(exc, 'strerror', None) or exc}") from exc
    return _check(*_parse_yaml(text, source), source)


def parse_config(mapping: Mapping[str, Any], source: str = "inline") -> Config:
    """Check plain data as the YAML would hold it; ``source`` names it in errors. Raises ConfigError."""
    return _check(mapping, {}, source)


def from_extra_config(extra: Mapping[str, Any]) -> Config:
    """Read what ``kv_connector_extra_config["config"]`` holds: the path of a file, or an inline mapping.

    Raises ConfigError, also when the key is missing.
    """
    value = extra.get("config")
    if isinstance(value, str | os.PathLike):
        return load_config(value)
    if isinstance(value, Mapping):
        return parse_config(value, "kv_connector_extra_config.config")
    found = "is missing" if value is None else f"{_shown(value)} is refused"
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
                f"vllm.{key}: the config says {_shown(value)}, kv_connector_extra_config says "
                f"{_shown(extra[key])}; say it in one place"
            )
    return {**extra, **config.vllm}


def kv_transfer_config(config: Config, reference: str | Mapping[str, Any]) -> dict[str, Any]:
    """Return what ``--kv-transfer-config`` takes. ``reference`` is the path of the file, or its content."""
    return {
        "kv_connector": CONNECTOR_NAME,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
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


def _check(data: object, lines: Mapping[Path, int], source: str) -> Config:
    data = {} if data is None else data
    if not isinstance(data, Mapping):
        raise ConfigError(f"{source}: {_shown(data)} is not a mapping; allowed: fields such as tenant and tiers")
    problems = dict.fromkeys(
        _credentials(data, ()),
        "credentials are not part of this file; they come from the AWS chain (environment, ~/.aws, the machine's role);"
        " remove the field",
    )
    try:
        if not problems:
            return Config.model_validate(data)
    except ValidationError as error:
        # If pydantic has refused the tiers that are there, it also reports too few tiers.
        found = [each for each in error.errors() if each["type"] != "too_short" or not each["input"]]
        problems = dict(_problem(each, data) for each in reversed(found))
    rendered = []
    for path, words in problems.items():
        line = next((lines[path[:n]] for n in range(len(path), 0, -1) if path[:n] in lines), 0)
        rendered.append((line, f"{source}:{line}" if line else source, f"{_render(path)}: {words}"))
    # "from None": pydantic's own text would repeat the values that the message withholds.
    raise ConfigError("\n".join(f"{where}: {said}" for _, where, said in sorted(rendered))) from None


def _credentials(value: object, path: Path) -> Iterator[Path]:
    """Yield where fields stand that look like credentials."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            if isinstance(key, str) and _CREDENTIAL.search(key):
                yield (*path, key)
            else:
                yield from _credentials(item, (*path, key))
    elif isinstance(value, list | tuple):
        for position, item in enumerate(value):
            yield from _credentials(item, (*path, position))


def _problem(details: ErrorDetails, raw: Mapping[str, Any]) -> tuple[Path, str]:
    """Say one of pydantic's findings about ``raw`` in our words: where, and what would be right."""
    loc, kind, context = details["loc"], details["type"], details.get("ctx", {})
    # pydantic puts the tier's kind behind its position.
    path: Path = (*loc[:2], *loc[3:]) if loc[:1] == ("tiers",) else loc
    path = (*path, *context.get("field", ()))
    name = str(path[-1]) if path else ""
    # The user may have put a key where the name of its file belongs.
    value = "***" if path[:1] == ("authenticate",) else _written(path, raw)
    expected = re.findall(r"'(.*?)'", str(context.get("expected") or context.get("expected_tags", "")))
    if kind == "extra_forbidden":
        model = next((_MODELS[str(part)] for part in reversed(loc[:-1]) if part in _MODELS), Config)
        fields = list(VllmOptions.__annotations__) if path[0] == "vllm" else _fields(model)
        elsewhere = [tier for tier, other in TIER_MODELS.items() if path[0] == "tiers" and name in _fields(other)]
        hint = f"; it belongs to kind {' or '.join(elsewhere)}" if elsewhere else ""
        return path, f"unknown field{_did_you_mean(name, fields)}{hint}; allowed: {', '.join(fields)}"
    if kind == "missing":
        return path, "is required"
    if kind == "union_tag_not_found":
        return (*path, "kind"), f"is required; allowed: {', '.join(TIER_MODELS)}"
    if kind in ("literal_error", "union_tag_invalid"):
        path = path if kind == "literal_error" else (*path, "kind")
        value = _written(path, raw)
        return path, f"{_shown(value)} is unknown{_did_you_mean(value, expected)}; allowed: {', '.join(expected)}"
    if kind == "value_error":
        return path, f"{_shown(value)} {context['error']}"
    if kind == "rule":
        return path, context["message"]
    if name in ALLOWED:
        return path, f"{_shown(value)} is refused; allowed: {ALLOWED[name]}"
    words = "input should be a mapping" if kind.startswith(("model_", "dict_")) else details["msg"]
    return path, f"{_shown(value)} is refused: {words[:1].lower()}{words[1:]}"


def _fields(model: type[BaseModel]) -> list[str]:
    return [field.alias or name for name, field in model.model_fields.items()]


def _did_you_mean(word: object, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1) if isinstance(word, str) else []
    return f" (did you mean {close[0]!r}?)" if close else ""


def _written(path: Path, raw: object) -> object:
    """Return the value as the user wrote it; pydantic's is already converted, "1KiB" to 1024."""
    try:
        return functools.reduce(operator.getitem, path, raw)  # type: ignore[arg-type]  # what has no items raises
    except (KeyError, IndexError, TypeError):
        return None


def _shown(value: object) -> str:
    """Render ``value`` for an error: short, one line, without what stands before an @ (user and password of a URL)."""
    text = _USERINFO.sub("***@", repr(value))
    return text if len(text) <= _SHOWN_CHARS else f"{text[: _SHOWN_CHARS - 3]}..."


# YAML text to plain data and the lines in which it stands.


def _parse_yaml(text: str, source: str) -> tuple[Any, dict[Path, int]]:
    """Return the data, and the line of each key and list item, counted from 1. Raises ConfigError."""
    lines: dict[Path, int] = {}
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None, lines
        _note_lines(node, (), lines)
        return loader.construct_document(node), lines
    except yaml.MarkedYAMLError as exc:
        mark = exc.problem_mark or exc.context_mark
        where = f"{source}:{mark.line + 1}:{mark.column + 1}" if mark else source
        raise ConfigError(f"{where}: not valid YAML: {exc.problem or exc.context}") from exc
    except yaml.YAMLError as exc:
        raise ConfigError(f"{source}: not valid YAML: {' '.join(str(exc).split())}") from exc
    except (ValueError, LookupError, AttributeError) as exc:
        # A date that no calendar has, or "!!bool maybe". The value is not shown: it may be a secret.
        raise ConfigError(f"{source}: not valid YAML: a value does not fit its tag") from exc
    except RecursionError as exc:
        raise ConfigError(f"{source}: nested too deeply to be a config") from exc


class _Loader(yaml.SafeLoader):
    """The safe loader without aliases, which make a file say something else than a reader sees."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]  # types-PyYAML leaves it bare
            raise yaml.composer.ComposerError(None, None, "anchors and aliases are not supported here", mark)
        return super().compose_node(parent, index)


def _note_lines(node: yaml.Node, path: Path, lines: dict[Path, int]) -> None:
    """Note the line of everything below ``node``. Raises MarkedYAMLError for a key that is given twice."""
    if isinstance(node, yaml.SequenceNode):
        for position, item in enumerate(node.value):
            lines[(*path, position)] = item.start_mark.line + 1
            _note_lines(item, (*path, position), lines)
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            child = (*path, key.value) if isinstance(key, yaml.ScalarNode) else path
            if child in lines:
                said = f"{_render(child)} is given twice, first in line {lines[child]}; say it once"
                raise yaml.MarkedYAMLError(None, None, said, key.start_mark)
            if child != path:
                lines[child] = key.start_mark.line + 1
            _note_lines(value, child, lines)


def _render(path: Path) -> str:
    """Return ``tiers[1].capacity`` for ``("tiers", 1, "capacity")``; an empty path is the whole file."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".") or "the file"
