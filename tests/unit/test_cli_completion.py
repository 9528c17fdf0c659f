"""``nixl-offload completion``: real shells complete our commands, options and files with what it prints."""

from __future__ import annotations

import os
import pty
import re
import select
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nixl_offload.cli.completion import SHELLS
from nixl_offload.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
_PATIENCE_S = 30.0


@pytest.fixture
def script(request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """The script for the shell that the test names."""
    assert main(["completion", request.param]) == 0
    path = tmp_path / f"completion.{request.param}"
    path.write_text(capsys.readouterr().out)
    return path


def _shell(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


@pytest.mark.parametrize("script", ["bash", "zsh", "fish"], indirect=True)
def test_the_script_is_well_formed(script: Path) -> None:
    """The shell itself reads it and runs nothing (tcsh has no such option worth the name)."""
    shell = _shell(script.suffix[1:])
    done = subprocess.run([shell, "-n", str(script)], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def _answers(script: Path, words: list[str]) -> list[str]:
    """Ask bash's completion what would complete the last of ``words``."""
    code = (
        f"source {shlex.quote(str(script))}; "
        f"COMP_WORDS=({' '.join(map(shlex.quote, words))}); COMP_CWORD={len(words) - 1}; "
        f'COMP_LINE="${{COMP_WORDS[*]}}"; COMP_POINT=${{#COMP_LINE}}; '
        'spec=$(complete -p nixl-offload); function=${spec##*-F }; "${function%% *}"; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    command = [_shell("bash"), "--norc", "-c", code]
    done = subprocess.run(command, cwd=script.parent, capture_output=True, text=True, timeout=60, check=True)
    return sorted(done.stdout.split())


@pytest.mark.parametrize("script", ["bash"], indirect=True)
def test_bash_knows_every_command_its_options_and_files(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    listed = re.findall(r"^    ([a-z]+)(?: |$)", capsys.readouterr().out.partition("\ncommands:\n")[2], re.MULTILINE)
    assert {"show", "check", "bucket", "gc", "schema", "completion"} <= {*listed}
    assert _answers(script, ["nixl-offload", ""]) == sorted(listed)
    assert "--older-than" in _answers(script, ["nixl-offload", "gc", "--ol"])
    assert _answers(script, ["nixl-offload", "bucket", ""]) == ["init"]
    assert _answers(script, ["nixl-offload", "gc", "--tier", ""]) == ["s3", "shared_dir", "slab"]
    assert _answers(script, ["nixl-offload", "completion", ""]) == sorted(SHELLS)
    (script.parent / "deep").mkdir()
    (script.parent / "deep/kv.yaml").touch()
    assert _answers(script, ["nixl-offload", "show", "deep/k"]) == ["deep/kv.yaml"]


@pytest.mark.parametrize("script", ["bash"], indirect=True)
def test_tab_completes_in_an_interactive_bash(script: Path) -> None:
    """On a terminal, as a user types it: ``nixl-offload ch<TAB>`` becomes ``nixl-offload check``."""
    bash = _shell("bash")
    keyboard, terminal = pty.openpty()
    shell = subprocess.Popen(
        [bash, "--norc", "--noprofile", "-i"],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        cwd=script.parent,
        env={"PATH": os.environ["PATH"], "TERM": "dumb", "PS1": "ready> ", "INPUTRC": "/dev/null", "HISTFILE": ""},
        start_new_session=True,
    )
    os.close(terminal)
    try:
        os.write(keyboard, f"source {shlex.quote(str(script))}; echo sour''ced\n".encode())
        _read_until(keyboard, b"sourced\r\n")
        os.write(keyboard, b"nixl-offload ch\t")
        assert _read_until(keyboard, b"nixl-offload check")
    finally:
        shell.kill()
        shell.wait()
        os.close(keyboard)


def _read_until(descriptor: int, expected: bytes) -> bytes:
    seen, deadline = b"", time.monotonic() + _PATIENCE_S
    while expected not in seen:
        ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, f"no {expected!r} in {seen!r}"
        seen += os.read(descriptor, 4096)
    return seen


@pytest.mark.parametrize("script", ["zsh"], indirect=True)
def test_zsh_takes_the_script_as_a_completion(script: Path) -> None:
    """``compinit`` finds it on ``fpath`` and binds it to our command."""
    script.rename(script.parent / "_nixl-offload")
    where = shlex.quote(str(script.parent))
    code = f"fpath+=({where}); autoload -Uz compinit; compinit -D -u; print $_comps[nixl-offload]"
    command = [_shell("zsh"), "-f", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "_nixl-offload"


@pytest.mark.parametrize("script", ["fish"], indirect=True)
def test_fish_completes(script: Path, tmp_path: Path) -> None:
    command = [_shell("fish"), "--no-config", "-c", f"source {script}; complete -C 'nixl-offload ch'"]
    environment = {**os.environ, "HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert [line.split("\t")[0] for line in done.stdout.splitlines()] == ["check"]


def test_every_shell_that_is_offered_gets_a_script(capsys: pytest.CaptureFixture[str]) -> None:
    for shell in SHELLS:
        assert main(["completion", shell]) == 0
        assert "nixl-offload" in capsys.readouterr().out


def test_other_commands_do_not_load_shtab() -> None:
    code = "import sys; from nixl_offload.cli.main import main; main(['schema']); sys.exit('shtab' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, timeout=60, check=False)
    assert done.returncode == 0
