"""What README.md, CONTRIBUTING.md, CHANGELOG.md and docs/*.md say is true: commands run, configs load, links lead
somewhere, and each line of the log that warns is in docs/log-messages.md, and the other way round.

A block of shell commands is run where a comment before it says in which place:

    <!-- runs: file -->      with kv.yaml: a slab in a fresh directory
    <!-- runs: stored -->    with kv.yaml: a shared directory that holds good chunks
    <!-- runs: bucket -->    with kv.yaml: a bucket of a local S3 server, and its credentials in the environment
    <!-- needs: ... -->      not run: says in words what it needs (a GPU, a vLLM server, a registry)

A block of text right behind it is what it prints, but for figures. docs/commands.md explains all names in JSON.
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

import pytest
import yaml

from nixl_offload.cli import main as cli
from nixl_offload.config import parse_config
from nixl_offload.stores.directory import TreeStore
from tests.s3.servers import MotoServer
from tests.unit.stored_rig import put_image, put_manifest, stored_namespace

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
TEXTS = {str(page.relative_to(ROOT)): page.read_text() for page in PAGES}
WHOLE = "\n".join(TEXTS.values())
LEVELS = {"warning", "error", "critical", "exception"}
FENCE = r"^ *```%s\n(.*?)^ *```$"
PRINTS = rf"<!-- runs: (\w+) -->\n+{FENCE[1:] % 'sh'}(?:\n{FENCE[1:] % 'text'})?"
RUN = re.findall(PRINTS, WHOLE, re.MULTILINE | re.DOTALL)
CONFIGS = [text for text in re.findall(FENCE % "yaml", WHOLE, re.MULTILINE | re.DOTALL) if "tiers:" in text]


@pytest.fixture(scope="module")
def bucket_server() -> Iterator[MotoServer]:
    """Its bucket rules are real enough for ``bucket init``."""
    with MotoServer() as server:
        yield server


def _without_figures(text: str) -> str:
    return re.sub(r"[0-9a-f]{32}|\d[\d.,]*(?:[KMG]iB)?", "0", text)


@pytest.mark.parametrize(("kind", "text", "shown"), sorted(set(RUN)), ids=lambda part: part.partition("\n")[0][:40])
def test_the_commands_run(tmp_path: Path, bucket_server: MotoServer, kind: str, text: str, shown: str) -> None:
    """All lines of a block run in a terminal whose shell stops at the first failure. Every question gets a yes."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    environment |= {"HOME": str(tmp_path), "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    environment |= {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path / ".cache")}
    tier: dict[str, object] = {"kind": "slab", "path": str(tmp_path / "kv"), "capacity": "64MiB"}
    if kind == "stored":
        tier["kind"] = "shared_dir"
        with contextlib.closing(TreeStore(str(tmp_path / "kv"))) as store:
            for number in range(3):
                put_image(store, stored_namespace(), number)
            put_manifest(store, stored_namespace())
    elif kind == "bucket":
        environment |= bucket_server.environment
        tier = bucket_server.tier(prefix="prod", ttl="7d", capacity="1GiB")
    (tmp_path / "kv.yaml").write_text(yaml.safe_dump({"tiers": [tier]}))
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin/nixl-offload"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m nixl_offload.cli.main "$@"\n')
    program.chmod(0o755)
    keyboard, terminal = os.openpty()
    try:
        os.write(keyboard, b"y\n")
        shell = ["bash", "-euo", "pipefail", "-c", text]
        done = subprocess.run(
            shell, cwd=tmp_path, env=environment, stdin=terminal, capture_output=True, timeout=120, check=False
        )
    finally:
        os.close(keyboard)
        os.close(terminal)
    assert done.returncode == 0, f"{text}:\n{done.stdout!r}\n{done.stderr!r}"
    printed = done.stdout.decode().replace(str(tmp_path), "/mnt")
    assert not shown or _without_figures(printed) == _without_figures(shown)
    for name in re.findall(r'"([\w ]+)":', printed if "--json" in text else ""):
        assert f"`{name}`" in TEXTS["docs/commands.md"], name


def test_configs_in_the_pages_are_loaded() -> None:
    assert {kind for kind, *_ in RUN} == {"file", "stored", "bucket"}
    assert CONFIGS
    for text in CONFIGS:
        parse_config(yaml.safe_load(text))


def test_every_command_that_is_mentioned_exists() -> None:
    """Commands and options in running text and in blocks, those that are not run included."""
    for name, rest in re.findall(r"\bnixl-offload ([a-z]+(?: init)?)([^`|;)>\n]*)", WHOLE):
        if name.split()[0] in cli.COMMANDS:
            with pytest.raises(SystemExit), contextlib.redirect_stdout(io.StringIO()) as shown:
                cli.main([*name.split(), "--help"])
            for option in re.findall(r"(?<![\w-])--[a-z-]+", rest.partition("#")[0]):
                assert option in shown.getvalue(), f"nixl-offload {name} {option}"


def test_links_lead_somewhere() -> None:
    """Relative links between pages and into the repository."""
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s#]+)[^)\s]*\)", page.read_text()):
            assert "://" in target or (page.parent / target).exists(), f"{page.name}: {target}"


# The table of warnings in docs/log-messages.md


def _explained() -> list[str]:
    """Return the parts of log lines that the tables name, in the first column."""
    rows = [line.split("|")[1] for line in TEXTS["docs/log-messages.md"].splitlines() if line.startswith("| `")]
    return [part for row in rows for part in re.findall(r"`([^`]+)`", row)]


def _plain(text: str) -> str:
    return re.sub(r"%[#.0-9]*[a-zA-Z]", "…", text)


def _calls_and_texts() -> Iterator[tuple[str, ast.expr]]:
    """Yield every call and every text of the package, and where it stands; commands left out."""
    for path in sorted((ROOT / "nixl_offload").rglob("*.py")):
        if "cli" not in path.parts:
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call | ast.Constant):
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", node


def test_every_warning_in_the_code_is_explained() -> None:
    """A line that is only another error's words (``%s``) says what that error says."""
    parts = _explained()
    for where, call in _calls_and_texts():
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
            continue
        holder = ast.unparse(call.func.value).rpartition(".")[2]
        if call.func.attr in LEVELS and holder in {"logger", "_log", "log", "complaints"}:
            constants = [arg.value for arg in call.args[:2] if isinstance(arg, ast.Constant)]
            texts = [text for text in constants if isinstance(text, str) and (" " in text or text == "%s")]
            assert texts, f"{where}: the text of a log line must be a constant"
            text = _plain(texts[-1])
            assert text == "…" or any(part in text for part in parts), f"explain in log-messages.md: {where}: {text}"


def test_every_warning_that_is_explained_exists() -> None:
    constants = [node.value for _, node in _calls_and_texts() if isinstance(node, ast.Constant)]
    texts = {_plain(text) for text in constants if isinstance(text, str) and not text.startswith("\n")}
    assert len(_explained()) > 40
    for part in _explained():
        assert any(part in text for text in texts), f"no line of the code has {part!r}"
