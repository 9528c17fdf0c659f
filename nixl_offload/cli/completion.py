"""``nixl-offload completion SHELL``: prints what makes a shell complete commands, options and files.

Threading: one thread; writes nothing but its output. The script is made by shtab from the parser itself, so a command
that is added is completed without a word here.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Final, TextIO

from nixl_offload.cli.common import Commands, add_command

SHELLS: Final = ("bash", "zsh", "fish", "tcsh")
_FILES: Final = ("CONFIG", "PATH")
_DESCRIPTION = """\
Prints a script that makes SHELL complete the commands and options of nixl-offload, and the files that they take.

    source <(nixl-offload completion bash)                       # bash: now; in ~/.bashrc: always
    nixl-offload completion bash > ~/.local/share/bash-completion/completions/nixl-offload
    nixl-offload completion zsh > ~/.zfunc/_nixl-offload         # zsh: with fpath+=~/.zfunc before compinit
    nixl-offload completion fish > ~/.config/fish/completions/nixl-offload.fish
    nixl-offload completion tcsh > ~/.nixl-offload.tcsh          # tcsh: and source it in ~/.tcshrc

Print it anew after an upgrade.
"""


def add_parser(commands: Commands) -> None:
    """Add ``completion`` to the command line."""
    parser = add_command(commands, "completion", run, description=_DESCRIPTION, config=False, json=None)
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help=", ".join(SHELLS))


def run(arguments: argparse.Namespace, out: TextIO) -> int:
    """Print to ``out``."""
    import shtab

    from nixl_offload.cli.main import whole_parser

    parser = whole_parser()
    for action in _actions(parser):
        if action.metavar in _FILES or action.metavar == "DIR":
            action.complete = shtab.DIRECTORY if action.metavar == "DIR" else shtab.FILE  # type: ignore[attr-defined]
    out.write(shtab.complete(parser, arguments.shell).rstrip("\n") + "\n")
    return 0


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield the arguments of a parser and of all below it."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from _actions(below)
