"""Makes plain settings, ``path -> value``, out of a tree of configuration objects, without excused fields.

Equal configurations give equal settings in every process, and different ones give different settings. A value that
cannot be compared between processes is replaced by a random one: that costs a cold cache, not a wrong answer.

Threading: pure functions, but they read the files and directories that a setting names: these count by content.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import inspect
import json
import math
import os
import re
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import PurePath
from typing import Any, Final, NamedTuple

from nixl_offload.identity.namespace import Setting
from nixl_offload.identity.weights import PIECE_BYTES, digest_of_file

_LONG_CHARS: Final = 160
_MOST_LEAVES: Final = 256
"""A mapping or object with more leaves counts as one digest: the manifest stays short."""
_MOST_DEPTH: Final = 32
_SECRET: Final = re.compile(
    r"auth|bearer|cookie|credential|jwt|key|pass|pwd|sas\b|secret|signature|token", re.IGNORECASE
)
"""Matches names of secrets. It matches harmless names, too: their values count just as well by a digest."""
_HOLDS_SECRET: Final = re.compile(
    r"(auth\w*|bearer|cookie|key|passw\w*|pwd|secret|token)[\"']?\s*[:=\s]", re.IGNORECASE
)
_URL_WITH_USER: Final = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s]*@", re.IGNORECASE)
_ADDRESS: Final = re.compile(r" at 0x[0-9a-f]+", re.IGNORECASE)

DigestFile = Callable[[str], str]
"""Returns the digest of a file's content, by its path."""


class Settings(NamedTuple):
    """The settings that were found."""

    values: dict[str, Setting]
    incomparable: list[str]
    """Paths whose values mean nothing in another process. If any, nothing is shared, or found after a restart."""


def collect(
    value: object, excused: Mapping[str, Mapping[str, str]], digest_file: DigestFile = digest_of_file
) -> Settings:
    """Return the settings of ``value``: dataclasses, mappings, sequences, and objects by their attributes.

    ``excused``: by class, the fields to leave out. Those of a base class hold for derived classes; those of
    ``PretrainedConfig`` for all objects with ``to_dict``. ``digest_file``: as for ``text_setting``.
    """
    walk = _Walk(excused, digest_file)
    return Settings(dict(walk.leaves(value, "")), walk.incomparable)


def digest_of(text: str) -> str:
    """Return a short digest to stand for a long or secret ``text``."""
    return f"sha256:{hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()[:32]}"


def plain_text(name: str, text: str) -> str:
    """Return ``text``, or its digest if it is long or may hold a secret. ``name``: of the setting, or its path."""
    secret = _SECRET.search(name) or _HOLDS_SECRET.search(text) or _URL_WITH_USER.search(text)
    if secret or len(text) > _LONG_CHARS:
        return digest_of(text)
    return text


@dataclass(slots=True)
class _Walk:
    excused: Mapping[str, Mapping[str, str]]
    digest_file: DigestFile
    incomparable: list[str] = field(default_factory=list)
    inside: list[int] = field(default_factory=list)
    """Identities of the objects that are being walked, outermost first."""
    done: dict[int, tuple[object, str]] = field(default_factory=dict)
    """By identity: an object that was walked, and its path."""

    def leaves(self, value: object, path: str) -> Iterator[tuple[str, Setting]]:
        """Yield the leaves below ``value``, or ``value`` itself if it is one."""
        scalar = _scalar(value)
        if not isinstance(scalar, _NoScalar):
            yield path, text_setting(path, scalar, self.digest_file) if isinstance(scalar, str) else scalar
        elif id(value) in self.inside:
            yield path, "(itself)"
        elif id(value) in self.done:
            yield path, f"(as {self.done[id(value)][1]})"
        elif len(self.inside) >= _MOST_DEPTH:
            yield path, self._incomparable(path)
        else:
            self.inside.append(id(value))
            try:
                if isinstance(value, (Sequence, Set)):
                    yield path, plain_text(path, self._list_text(value, path))
                else:
                    yield from self._below(value, path)
                    self.done[id(value)] = (value, path)
            finally:
                self.inside.pop()

    def _below(self, value: object, path: str) -> Iterator[tuple[str, Setting]]:
        items = self._items(value)
        if items is None:
            text = repr(value)
            # The repr of a long array is abbreviated.
            is_known = not _ADDRESS.search(text) and not hasattr(value, "shape")
            yield path, plain_text(path, text) if is_known else self._incomparable(path)
            return
        found = [leaf for name, item in items for leaf in self.leaves(item, f"{path}.{name}" if path else name)]
        if not isinstance(value, Mapping) and path:
            found.insert(0, (f"{path}.(type)", type(value).__qualname__))
        if not found:
            yield path, "(empty)"
        elif len(found) > _MOST_LEAVES and path.count(".") > 0:
            yield path, digest_of(json.dumps(found))
        else:
            yield from found

    def _items(self, value: object) -> list[tuple[str, object]] | None:
        """Return names and values below ``value``; None if it shows none.

        ``PretrainedConfig`` is tested first: it is a dataclass, too, but has more than its fields.
        """
        model_config = _model_config_of(value)
        if model_config is not None:
            excused = self.excused.get("PretrainedConfig", {})
            return [(_key(name), _without(item, excused)) for name, item in model_config.items() if name not in excused]
        if dataclasses.is_dataclass(value):
            left_out = self._excused_of(type(value))
            names = [item.name for item in dataclasses.fields(value) if item.name not in left_out]
            return [(name, getattr(value, name, None)) for name in names]
        if isinstance(value, Mapping):
            return sorted(((_key(key), item) for key, item in value.items()), key=itemgetter(0))
        attributes = getattr(value, "__dict__", None)
        if attributes and not callable(value):
            left_out = self._excused_of(type(value))
            return sorted(
                ((name, item) for name, item in attributes.items() if name not in left_out), key=itemgetter(0)
            )
        return None

    def _excused_of(self, kind: type) -> set[str]:
        return {name for base in kind.__mro__ for name in self.excused.get(base.__name__, ())}

    def _list_text(self, value: Sequence[object] | Set[object], path: str) -> str:
        parts = [dict(self.leaves(item, f"{path}[{number}]")) for number, item in enumerate(value)]
        texts = []
        for number, part in enumerate(parts):
            at = f"{path}[{number}]"  # only the rest of a leaf's path belongs to the item
            own = part[at] if list(part) == [at] else {name[len(at) :]: leaf for name, leaf in part.items()}
            texts.append(json.dumps(own))
        return "[" + ", ".join(sorted(texts) if isinstance(value, Set) else texts) + "]"

    def _incomparable(self, path: str) -> str:
        self.incomparable.append(path)
        return f"(of this process alone) {uuid.uuid4().hex}"


class _NoScalar:
    """Stands for a value whose type is not a leaf's."""


def _scalar(value: object) -> Setting | _NoScalar:
    """Return a value that is a leaf by its type. Subclasses of str and numbers count as their base class."""
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else repr(float(value))
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, (bytes, bytearray)):
        return digest_of(bytes(value).hex())
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, type) or (inspect.isroutine(value) and "<" not in value.__qualname__):
        return f"{value.__module__}.{value.__qualname__}"  # a lambda's name says nothing of it
    return _NoScalar()


def text_setting(path: str, text: str, digest_file: DigestFile = digest_of_file) -> str:
    """Return the setting for a text. If it names a file or a directory, that is a digest of the content, which may be
    different tomorrow; else the result of ``plain_text``.

    ``digest_file`` is called for a directory or a large file. It raises NamespaceError if one is unreadable or changes.
    """
    names_path = os.sep in text or path.endswith(("_path", "_file", "_dir"))
    if names_path and os.path.isdir(text):
        return f"directory {digest_of(digest_file(text))}"
    if names_path and os.path.isfile(text):
        try:
            with open(text, "rb") as file:
                if os.fstat(file.fileno()).st_size <= PIECE_BYTES:
                    return f"file {digest_of(hashlib.file_digest(file, 'sha256').hexdigest())}"
        except OSError:
            return plain_text(path, text)
        return f"file {digest_of(digest_file(text))}"
    return plain_text(path, text)


def _model_config_of(value: Any) -> Mapping[str, object] | None:
    """Return what a ``PretrainedConfig`` would write to ``config.json``, as mappings; None for other objects."""
    try:
        found = value.to_dict()
    except Exception:  # noqa: BLE001 - most have no such method, and that of a model's own code may fail
        return None
    return found if isinstance(found, Mapping) else None


def _key(key: object) -> str:
    """Return a name for a key. 1 and "1" get different names, and so do ``{"a.b": ...}`` and ``{"a": {"b": ...}}``."""
    if not isinstance(key, str):
        return f"({type(key).__name__}) {key}"
    return json.dumps(str.__str__(key)) if re.search(r"[.\[\]()\"]", key) else str.__str__(key)


def _without(value: object, names: Mapping[str, str]) -> object:
    """Return ``value`` without these keys, at any depth of mappings."""
    if isinstance(value, Mapping):
        return {key: _without(item, names) for key, item in value.items() if key not in names}
    return value
