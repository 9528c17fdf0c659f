"""What a server's command line comes to, as far as that shows without a rank: what ``nixl-offload check`` compares.

vLLM's own parser and its own checks make the final configuration, as ``vllm serve`` does at start. No engine is
started and no weights are read. vLLM asks the Hub for a model's config, and keeps that, where it always does.

Threading: one thread, in a process of its own: vLLM changes the environment and may reach for devices.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import functools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NoReturn

from pydantic import ValidationError
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.cli import serve
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser

from nixl_offload.chunk.shards import LayerCut
from nixl_offload.config import CONNECTOR_NAME, Config, from_extra_config
from nixl_offload.errors import ConfigError, NotSupportedError
from nixl_offload.identity.compare import Argument, Server, differing
from nixl_offload.identity.excused import EXCUSED, EXCUSED_WITH_SHARDS
from nixl_offload.identity.namespace import Setting
from nixl_offload.identity.settings import collect, plain_text
from nixl_offload.identity.weights import digest_of_file
from nixl_offload.vllm.identity import known_by_name_alone, known_fields, models_of, reason_to_stay_off
from nixl_offload.vllm.plugin import register
from nixl_offload.vllm.rank_shards import cut_by_config, kv_heads

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_TOLD: Final = EXCUSED["ModelConfig"]["model"]
"""Of fields that are excused because the namespace has them in another form."""
_REASONS: Final = {name: reason for fields in EXCUSED.values() for name, reason in fields.items() if reason != _TOLD}
_ENGINE_ARGUMENTS: Final = frozenset(each.name for each in dataclasses.fields(AsyncEngineArgs))
_SENTENCE_CHARS: Final = 300
_USER: Final = re.compile(r"/+[^/\s]*:[^/\s]*@|//[^/\s]*@")
"""User and password of a URL; libraries that take it for a path leave one slash."""


def describe(words: Sequence[str], other: Sequence[str] | None, transfer: Mapping[str, Any]) -> Server:
    """Return what the arguments ``words`` of ``vllm serve`` come to, and in which of them ``other`` differs.

    ``transfer``: the ``--kv-transfer-config`` of a list that has none. Raises ConfigError: vLLM has no such arguments;
    NotSupportedError: it makes no configuration of them here.
    """
    register()
    own = _parse(words)
    try:
        theirs = vars(_parse(other)) if other is not None else {}
    except ConfigError:
        theirs = {}  # who describes the other one says so
    unequal = {
        name: _plain(name, value) if name in _ENGINE_ARGUMENTS else None
        for name, value in vars(own).items()
        if name in theirs and value != theirs[name]
    }
    server = _describe(own, transfer)
    arguments = {}
    for name, value in unequal.items():
        trial = _parse(words)
        setattr(trial, name, theirs[name])
        reason = _REASONS.get(name) if name in _ENGINE_ARGUMENTS else "the API server's own"
        arguments[name] = Argument(value, _changes(server, trial, transfer), reason)
    return dataclasses.replace(server, arguments=arguments)


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = _EngineArguments(prog="--vllm-args", add_help=False)  # type: ignore[no-untyped-call]
    serve.cmd_init()[0].subparser_init(parser.add_subparsers(dest="subparser"))
    try:
        found: argparse.Namespace = parser.parse_args(["serve", *words])
    except (ValueError, OSError, AssertionError) as error:  # a --config that cannot be read, among others
        raise ConfigError(f"--vllm-args: {_sentence(error)}") from error
    found.model = found.model_tag or found.model
    del found.model_tag
    return found


class _EngineArguments(FlexibleArgumentParser):
    """vLLM's, which leaves the process when an argument is wrong."""

    def error(self, message: str) -> NoReturn:
        unknown = re.match(r"unrecognized arguments: (--[^\s=]+)", message)
        known = [] if unknown is None else difflib.get_close_matches(unknown[1], self._options())
        nearest = f"; nearest: {known[0]}" if known else ""
        words = " ".join(message.partition("For further information")[0].split())
        begin, told, rest = words.partition("unrecognized arguments:")
        if told:  # what follows an unknown option may be a secret
            names = [word.partition("=")[0] for word in rest.split() if word.startswith("--")]
            words = f"{begin}{told} {' '.join(names) or 'a value that belongs to none'}"
        raise ConfigError(f"--vllm-args: {_without_users(words)}{nearest}")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        raise ConfigError("--vllm-args: --help starts no server")

    def _options(self) -> list[str]:
        below = [each for each in self._actions if isinstance(each, argparse._SubParsersAction)]
        parsers = [self, *(parser for each in below for parser in each.choices.values())]
        return [option for parser in parsers for option in parser._option_string_actions]


def _describe(arguments: argparse.Namespace, transfer: Mapping[str, Any]) -> Server:
    """``arguments`` are used up: vLLM changes objects in them."""
    with _own_environment():
        vllm_config = _final(arguments, transfer)
        config = _our_config(vllm_config, transfer)
        digest_file = functools.cache(digest_of_file)
        known: dict[str, Any] = dict(known_fields(vllm_config, config, {}, digest_file))
        settings = known.pop("settings")
        if config.shards is not None:
            cut = cut_by_config(vllm_config, config.shards)
            heads = kv_heads(vllm_config)
            if isinstance(cut, LayerCut):
                known["shards"] = str(heads if heads == 1 or config.shards.heads == "distinct" else config.shards.heads)
                # As far as the ranks understand what lies in their KV caches.
                known = {name: value for name, value in known.items() if name not in {"tp", "pp", "world_size"}}
                known["shards.layers"] = " ".join(map(str, cut.begins))
                settings = {name: value for name, value in settings.items() if name not in EXCUSED_WITH_SHARDS}
            elif config.shards.heads != "distinct":
                known["shards"] = f"per_rank, for {cut}"
        models = models_of(vllm_config)
        return Server(
            model=models["model_config"].name,
            revision=models["model_config"].revision,
            by_name_alone=known_by_name_alone(models["model_config"]),
            files={path: os.path.realpath(each.files) for path, each in models.items() if each.files is not None},
            values={**known, "chunk_tokens": config.chunk_tokens, **settings},
            incomparable=collect(vllm_config, EXCUSED, digest_file).incomparable,
            off=reason_to_stay_off(vllm_config, config),
            arguments={},
        )


def _changes(server: Server, trial: argparse.Namespace, transfer: Mapping[str, Any]) -> list[str] | None:
    try:
        changed = _describe(trial, transfer)
    except (ConfigError, NotSupportedError):
        return None
    return [each.path for each in differing(server.values, changed.values) if each.path not in changed.incomparable]


@contextlib.contextmanager
def _own_environment() -> Iterator[None]:
    """Undo what vLLM sets in the environment: the next configuration is made as by a new process."""
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _final(arguments: argparse.Namespace, transfer: Mapping[str, Any]) -> VllmConfig:
    try:
        if arguments.kv_transfer_config is None:
            arguments.kv_transfer_config = KVTransferConfig(**transfer)
        engine_arguments = AsyncEngineArgs.from_cli_args(arguments)
        serve.propagate_flash_late_interaction(arguments, engine_arguments)  # type: ignore[attr-defined]
        made: VllmConfig = engine_arguments.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
    except Exception as error:  # whatever vLLM, transformers or the Hub have against them
        raise NotSupportedError(f"vLLM makes no configuration of them here: {_sentence(error)}") from error
    return made


def _our_config(vllm_config: VllmConfig, transfer: Mapping[str, Any]) -> Config:
    found = vllm_config.kv_transfer_config
    if found is not None and found.kv_connector == CONNECTOR_NAME:
        return from_extra_config(found.kv_connector_extra_config)
    return from_extra_config(transfer["kv_connector_extra_config"])


def _plain(name: str, value: object) -> Setting:
    if isinstance(value, str):
        return plain_text(name, value)
    return value if isinstance(value, bool | int | float) else None


def _sentence(error: Exception) -> str:
    """Return the first sentence of what a library says, which may be pages."""
    text = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
    first = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
    return _without_users(first.removeprefix("Value error, ").partition(". ")[0].rstrip("."))[:_SENTENCE_CHARS]


def _without_users(text: str) -> str:
    return _USER.sub("//", text)
