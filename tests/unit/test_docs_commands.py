"""README.md, CONTRIBUTING.md, CHANGELOG.md and docs/*.md do what they say: every command runs here or says what it
needs, every config loads, every command line that is mentioned exists, every log line that is explained is in the code
and the other way round.

Before each block of shell commands stands a comment that says how it is tested:

    <!-- runs: file -->      with kv.yaml: a slab in a fresh directory
    <!-- runs: stored -->    with kv.yaml: a shared directory that holds good chunks
    <!-- runs: bucket -->    with kv.yaml: a bucket of a local S3 server, and its credentials in the environment
    <!-- needs: ... -->      not run: says in words what it needs (a GPU, a vLLM server, a registry)
"""

from __future__ import annotations

import ast
import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from nixl_offload.cli import main as cli
from nixl_offload.cli.commands import COMMANDS
from nixl_offload.config import parse_config
from nixl_offload.stores.directory import TreeStore
from tests.s3.servers import MotoServer
from tests.unit.shard_images import namespace, put_chunk, put_manifest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
OPERATIONS = ROOT / "docs/operations.md"
KINDS = ("file", "stored", "bucket")
SHELL = ("sh", "bash", "shell", "console")
_FENCE = re.compile(r"^ *```([a-z]*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
_MARK = re.compile(r"<!-- (runs|needs): ([^\n]+?) -->\n+\Z")
_COMMAND = re.compile(r"^ *(\$ )?(apt-get|aws|curl|docker|export|git|kubectl|make|nixl-offload|pip|python|sudo|vllm) ")
_LEVELS = {"warning", "error", "critical", "exception"}


class Block(NamedTuple):
    """A fenced block of a page."""

    page: Path
    line: int
    language: str
    text: str
    mark: tuple[str, str] | None
    """``runs`` or ``needs``, and what."""

    @property
    def is_shell(self) -> bool:
        return self.language in SHELL or (not self.language and any(map(_COMMAND.match, self.text.splitlines())))

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def _blocks() -> Iterator[Block]:
    for page in PAGES:
        text = page.read_text()
        for match in _FENCE.finditer(text):
            before = text[: match.start()]
            mark = _MARK.search(before)
            said = (mark[1], mark[2]) if mark else None
            yield Block(page, before.count("\n") + 1, match[1], match[2], said)


BLOCKS = list(_blocks())
RUN = [block for block in BLOCKS if block.is_shell and block.mark and block.mark[0] == "runs"]
RUN_ONCE = list({(block.text, block.mark): block for block in RUN}.values())
"""What several pages say alike is run once."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_of_commands_is_marked(page: Path) -> None:
    """Put ``<!-- runs: file -->`` or ``<!-- needs: a GPU -->`` on the line before it; see the top of this file."""
    for block in BLOCKS:
        if block.page == page and block.is_shell:
            assert block.mark is not None, f"{block}: is it run, or what does it need?"
            assert block.mark[0] == "needs" or block.mark[1] in KINDS, f"{block}: {block.mark[1]!r} is none of {KINDS}"
            assert block.language, f"{block}: say ```sh"


@pytest.fixture(scope="module")
def bucket_server() -> Iterator[MotoServer]:
    """Its bucket rules are real enough for ``bucket init``."""
    with MotoServer() as server:
        yield server


@pytest.fixture
def place(tmp_path: Path, bucket_server: MotoServer, request: pytest.FixtureRequest) -> tuple[Path, dict[str, str]]:
    """A directory with kv.yaml for the block, and the environment that a user's shell would have there."""
    kind = request.param
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    environment |= {"HOME": str(tmp_path), "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    environment |= {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path / ".cache")}
    tier: dict[str, object] = {"kind": "slab", "path": str(tmp_path / "kv"), "capacity": "64MiB"}
    if kind == "stored":
        tier["kind"] = "shared_dir"
        store = TreeStore(str(tmp_path / "kv"))
        for number in range(3):
            put_chunk(store, namespace(), number)
        put_manifest(store, namespace())
        store.close()
    elif kind == "bucket":
        environment |= bucket_server.environment
        tier = bucket_server.tier(prefix="prod", ttl="7d", capacity="1GiB")
    (tmp_path / "kv.yaml").write_text(yaml.safe_dump({"tiers": [tier]}))
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin/nixl-offload"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m nixl_offload.cli.main "$@"\n')
    program.chmod(0o755)
    return tmp_path, environment


@pytest.mark.parametrize(
    ("block", "place"), [(block, block.mark[1]) for block in RUN_ONCE if block.mark], ids=str, indirect=["place"]
)
def test_the_commands_run(block: Block, place: tuple[Path, dict[str, str]]) -> None:
    """All lines of a block, one after the other, as pasted into a terminal whose shell stops at the first failure, by
    somebody who says yes to what is asked.
    """
    directory, environment = place
    keyboard, terminal = os.openpty()
    try:
        os.write(keyboard, b"y\n")
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block.text],
            cwd=directory,
            env=environment,
            stdin=terminal,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    finally:
        os.close(keyboard)
        os.close(terminal)
    assert done.returncode == 0, f"{block}:\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "yaml" and "tiers:" in b.text], ids=str)
def test_configs_in_the_pages_are_loaded(block: Block) -> None:
    parse_config(yaml.safe_load(block.text))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_that_is_mentioned_exists(page: Path) -> None:
    """Commands and options in running text and in blocks, those that are not run included."""
    for words in re.findall(r"\bnixl-offload ([a-z]+(?: init)?)([^`|;)>\n]*)", page.read_text()):
        if words[0].split()[0] in COMMANDS:
            with pytest.raises(SystemExit), contextlib.redirect_stdout(io.StringIO()) as shown:
                cli.main([*words[0].split(), "--help"])
            for option in re.findall(r"(?<![\w-])--[a-z-]+", words[1].partition("#")[0]):
                assert option in shown.getvalue(), f"{page.name}: nixl-offload {words[0]} {option}"


def test_links_lead_somewhere() -> None:
    """Relative links and their anchors, between pages and into the repository."""
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", _FENCE.sub("", page.read_text())):
            path, _, anchor = target.partition("#")
            if "://" in target:
                continue
            file = (page.parent / path).resolve() if path else page
            assert file.exists(), f"{page.name}: {target}"
            if anchor:
                headings = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
                assert anchor in {_slug(heading) for heading in headings}, f"{page.name}: {target}"


def _slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


# The tables of docs/operations.md


def _explained() -> list[str]:
    """Return the parts of log lines that the tables name, in the first column."""
    text = OPERATIONS.read_text().partition("## Every warning and error in the log")[2]
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    return [part for row in rows for part in re.findall(r"`([^`]+)`", row)]


def _plain(text: str) -> str:
    return re.sub(r"%[#.0-9]*[a-zA-Z]", "…", text)


def _trees() -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted((ROOT / "nixl_offload").rglob("*.py")):
        if not {"testing", "cli"} & {*path.parts}:
            yield path, ast.parse(path.read_text())


def _log_lines() -> Iterator[tuple[str, str]]:
    """Yield place and text of every line that can be logged as a warning or worse while serving."""
    for path, tree in _trees():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            holder = ast.unparse(node.func.value).rpartition(".")[2]
            if node.func.attr in _LEVELS and holder in ("logger", "_log", "log", "complaints"):
                constants = [arg.value for arg in node.args[:2] if isinstance(arg, ast.Constant)]
                texts = [text for text in constants if isinstance(text, str) and (" " in text or text == "%s")]
                assert texts, f"{path}:{node.lineno}: the text of a log line must be a constant"
                yield f"{path.relative_to(ROOT)}:{node.lineno}", _plain(texts[-1])


def test_every_warning_in_the_code_is_explained() -> None:
    """A line that is only another error's words (``%s``) says what that error says."""
    parts = _explained()
    missing = [
        f"{where}: {text}" for where, text in _log_lines() if text != "…" and not any(part in text for part in parts)
    ]
    assert missing == [], "explain them in docs/operations.md"


def test_every_warning_that_is_explained_exists() -> None:
    texts = {
        _plain(node.value)
        for _, tree in _trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and not node.value.startswith("\n")
    }
    assert len(_explained()) > 40
    for part in _explained():
        assert any(part in text for text in texts), f"no line of the code has {part!r}"
