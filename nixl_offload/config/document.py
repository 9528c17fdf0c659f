"""YAML text to plain data that remembers its lines. The only reader of YAML in the package.

Threading: pure functions, safe anywhere. The safe loader is used; duplicate keys, anchors and merges are refused,
because each of them makes a file say something else than a reader sees.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import yaml

from nixl_offload.errors import ConfigError

Path = tuple[str | int, ...]
"""Where a value stands: ``("tiers", 1, "capacity")``."""


class Document(NamedTuple):
    """Parsed YAML."""

    data: Any
    lines: dict[Path, int]
    """1-based line of each key or list item."""


def render_path(path: Path) -> str:
    """Return ``tiers[1].capacity`` for ``("tiers", 1, "capacity")``; an empty path is the whole file."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".") or "the file"


def parse_yaml(text: str, source: str) -> Document:
    """Parse ``text``; ``source`` names it in errors. Raises ConfigError with line and column."""
    try:
        loader = _Loader(text)
    except yaml.reader.ReaderError as exc:
        line = text.count("\n", 0, exc.position) + 1
        raise ConfigError(
            f"{source}:{line}: not valid YAML: the character U+{exc.character:04X} is not allowed in YAML; remove it"
        ) from exc
    try:
        node = loader.get_single_node()
        if node is None:
            return Document(None, {})
        lines: dict[Path, int] = {}
        _note_lines(node, (), lines)
        return Document(loader.construct_document(node), lines)
    except yaml.MarkedYAMLError as exc:
        mark = exc.problem_mark or exc.context_mark
        where = f"{source}:{mark.line + 1}:{mark.column + 1}" if mark else source
        raise ConfigError(f"{where}: not valid YAML: {exc.problem or exc.context}") from exc
    except yaml.YAMLError as exc:
        raise ConfigError(f"{source}: not valid YAML: {' '.join(str(exc).split())}") from exc
    except RecursionError as exc:
        raise ConfigError(f"{source}: nested too deeply to be a config") from exc
    finally:
        loader.dispose()


class _Loader(yaml.SafeLoader):
    """The safe loader without aliases."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]  # types-PyYAML leaves it bare
            raise yaml.composer.ComposerError(None, None, "anchors and aliases are not supported here", mark)
        return super().compose_node(parent, index)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError) as exc:
            # A date that no calendar has, or "!!bool maybe". The value is not shown: it may be a secret.
            kind = node.tag.rpartition(":")[2]
            raise yaml.constructor.ConstructorError(None, None, f"this is no {kind}", node.start_mark) from exc


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
                said = f"{render_path(child)} is given twice, first in line {lines[child]}; say it once"
                raise yaml.MarkedYAMLError(None, None, said, key.start_mark)
            if child != path:
                lines[child] = key.start_mark.line + 1
            _note_lines(value, child, lines)
