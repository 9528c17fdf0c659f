"""Records docs/session.md: one session of an operator, from ``check`` to ``gc``, with a real vLLM in between.

    .venv/bin/python -m examples.session                 # runs it all and shows it
    .venv/bin/python -m examples.session --write docs/session.md
    .venv/bin/python -m examples.session serve kv.yaml   # the part with vLLM alone

Every command is run by a real shell in a temporary directory, which the text calls /mnt/nvme, by a Python whose place
it calls .venv; nothing else is changed in what was printed. Exits with 1, and writes nothing, when a command does not
end as the session says it must.

Threading: one thread. Ownership: the temporary directory and the engines; nothing is left.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

from examples.demo.engine import Engine, EngineError, quick_environment
from examples.demo.model import TINY, random_prompts, write_model

ROOT = Path(__file__).resolve().parents[1]
SHOWN_AS = "/mnt/nvme"
CHUNK_TOKENS = 256
PROMPTS = 3
PROMPT_TOKENS = 2048 + 50
BLOCK_TOKENS = 64
_PAYLOAD_OFFSET = 4096
"""Behind a chunk's header page: docs/format.md."""

CONFIG = f"""\
chunk_tokens: {CHUNK_TOKENS}
tiers:
  - {{kind: slab, path: {SHOWN_AS}/kv, capacity: 1GiB}}
"""


class SessionError(Exception):
    """A command did not end as it must."""


class Session:
    """A shell in ``directory`` and what was typed and printed there, as Markdown."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._parts: list[str] = []
        programs = directory / ".bin"
        programs.mkdir()
        modules = {"nixl-offload": "nixl_offload.cli.main", "serve": "examples.session serve"}
        for name, module in modules.items():
            program = programs / name
            program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m {module} "$@"\n')
            program.chmod(0o755)
        self._environment = {
            **os.environ,
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "COLUMNS": "110",
            "HOME": str(directory),
        }

    def say(self, text: str) -> None:
        """Add a paragraph or heading."""
        self._parts.append(textwrap.fill(text, 118) if not text.startswith("#") else text)

    def run(self, *commands: str, code: int = 0) -> str:
        """Run commands in one block and return what the last one printed. Raises SessionError."""
        lines, output = [], ""
        for command in commands:
            print(f"$ {command}", file=sys.stderr)
            output = self._output(command, code)
            lines += [f"$ {command}", *filter(None, [output])]
        note = "<!-- needs: a vLLM -->"
        self._parts.append("\n".join([note, "```console", *lines, "```"]))
        return output

    def ask(self, command: str) -> list[str]:
        """Run a command that the text does not show; return the lines."""
        return self._output(command, 0).splitlines()

    def text(self) -> str:
        """Return all of it."""
        return "\n\n".join(self._parts) + "\n"

    def _output(self, command: str, code: int) -> str:
        done = subprocess.run(
            ["bash", "-c", command.replace(SHOWN_AS, str(self._directory))],
            cwd=self._directory,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=600,
            check=False,
        )
        output = done.stdout.replace(str(self._directory), SHOWN_AS).replace(sys.prefix, ".venv").rstrip()
        if done.returncode != code:
            raise SessionError(f"$ {command}\n{output}\nended with {done.returncode}; it should have been {code}")
        return "\n".join(line.rstrip() for line in output.splitlines())


def record(directory: Path) -> str:
    """Go through the session in ``directory``, which must be empty. Raises SessionError."""
    session = Session(directory)
    (directory / "kv.yaml").write_text(CONFIG.replace(SHOWN_AS, str(directory)))
    write_model(directory / "model", TINY)
    session.say("# A session")
    session.say(
        "One server and one drive, recorded by `python -m examples.session --write docs/session.md` on a small, busy "
        "virtual machine: vLLM's CPU build, a model of four layers, a temporary directory shown as `/mnt/nvme`. "
        "`serve` starts a vLLM with the config, sends it three prompts, prints the answers and stops it."
    )
    session.say("## Check the config")
    session.run("cat kv.yaml")
    session.run("nixl-offload check kv.yaml")
    session.say("## Serve, stop, serve again")
    session.run("serve kv.yaml")
    session.say("The second server loads what the first one computed.")
    session.run("serve kv.yaml")
    session.say("## Look at what is stored")
    session.run("nixl-offload ls kv.yaml")
    first = json.loads(session.ask("nixl-offload ls kv.yaml --keys --json")[0])
    key = str(first["key"])
    session.run(f"nixl-offload stat kv.yaml {key[:16]}")
    session.say("## Damage a chunk")
    session.say("Overwrite one byte, as a failing drive might.")
    slab, offset = _slot(session, key)
    where = offset + _PAYLOAD_OFFSET + 12345
    session.run(rf"printf '\x5a' | dd of={slab} bs=1 seek={where} conv=notrunc status=none")
    session.run("nixl-offload verify kv.yaml", code=1)
    session.say(
        "A server needs no `verify`. It finds the damage, computes the chunk and stores it again. The answers are the "
        "same."
    )
    session.run("serve kv.yaml")
    session.run("nixl-offload verify kv.yaml")
    session.say("## Clean up")
    namespace = str(first["namespace"])
    session.run(f"rm -r /mnt/nvme/kv/{namespace}", "nixl-offload ls kv.yaml")
    return session.text()


def _slot(session: Session, key: str) -> tuple[str, int]:
    """Return the file and offset of the shard of rank 0, as the shown path."""
    text = "\n".join(session.ask(f"nixl-offload stat kv.yaml {key}"))
    found = re.search(r"(/\S+\.slab)@(\d+)", text)
    if found is None:
        raise SessionError(f"stat does not say where {key} lies:\n{text}")
    return found[1], int(found[2])


def serve(config: str) -> None:
    """Start a vLLM with ``config``, ask it the prompts, print how each was answered. Raises EngineError."""
    with tempfile.TemporaryDirectory(prefix="nixl-serve-", ignore_cleanup_errors=True) as name:
        scratch = Path(name)
        with Engine(
            Path("model").resolve(),
            connector=os.path.abspath(config),
            log=scratch / "engine.log",
            environment=quick_environment(scratch=scratch, in_process=True),
            dtype="float32",
            block_size=BLOCK_TOKENS,
            max_model_len=PROMPT_TOKENS + 16,
            max_num_batched_tokens=512,
            max_num_seqs=4,
            kv_cache_memory_bytes=256 << 20,
        ) as engine:
            for number, prompt in enumerate(random_prompts(TINY, [PROMPT_TOKENS] * PROMPTS), start=1):
                (answer,) = engine.generate([prompt], max_tokens=8)
                print(
                    f"prompt {number} of {PROMPT_TOKENS:,} tokens: first token after {1e3 * answer.ttft_s:.0f} ms, "
                    f"{answer.external_hit_tokens:,} tokens found, answer {' '.join(map(str, answer.tokens))}",
                    flush=True,
                )
            engine.settle(deadline_s=60.0)
            engine.stop()
        log = (scratch / "engine.log").read_text(errors="replace")
    for line in log.splitlines():
        if "was refused" in line:
            print(re.sub(r"^.*?(WARNING|ERROR) \S+ \S+ \[\S+\] ", r"\1 ", line))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.session", description=__doc__.splitlines()[0])
    parser.add_argument("part", nargs="?", choices=["serve"], help="only serve prompts with CONFIG, in this directory")
    parser.add_argument("config", nargs="?", default="kv.yaml", help="of serve")
    parser.add_argument("--write", metavar="FILE", type=Path, help="write it there instead of showing it")
    chosen = parser.parse_args(arguments)
    try:
        if chosen.part == "serve":
            serve(chosen.config)
            return 0
        with tempfile.TemporaryDirectory(prefix="nixl-session-") as directory:
            text = record(Path(directory).resolve())
    except (SessionError, EngineError) as error:
        print(error, file=sys.stderr)
        return 1
    if chosen.write is None:
        print(text, end="")
    else:
        chosen.write.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
