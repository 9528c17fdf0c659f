"""What tests of shared tiers over a running vLLM need: media that engines share, and ways to damage what rests there.

A medium is a bucket or a directory; both are files on this machine, so both are damaged alike, behind the engines'
backs. Prompts are cut as in ``damage``: one prefill step is one chunk, so answers are compared bit by bit wherever the
good prefix of a damaged prompt ends.

Threading: one test at a time. Ownership: servers belong to the fixtures that start them, directories to the workshop.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from examples.demo.model import TINY
from nixl_offload.chunk.header import HEADER_BYTES
from nixl_offload.tiers.shared.naming import parse_shard_name
from tests.s3.servers import RcloneServer
from tests.vllm.damage import CHUNK_BYTES, FULL_TOKENS, Prompt, Reference, loads_refused
from tests.vllm.harness import Answer, Engine, ModelShape, tier_config, tree_tier

SHARD_BYTES = HEADER_BYTES + CHUNK_BYTES
PREFIX = "team/kv"
MOVERS = ("obj", "obstore")

LOOK_EACH_TIME_S = 0.2
"""``present_for`` of engines that are to look again for each request; see ``Medium.looking``."""
LOOKING = {"timeout": "10s", "present_for": f"{int(LOOK_EACH_TIME_S * 1000)}ms", "absent_for": "300ms"}
REMEMBERING = {"timeout": "10s", "present_for": "1h", "absent_for": "300ms"}
RECOVERY_DEADLINE_S = 30.0


@dataclass(frozen=True)
class Medium:
    """Something that several engines share: the tier's config, where its files lie, what an engine's process needs."""

    name: str
    tier: Mapping[str, Any]
    directory: Path
    """What holds the namespaces."""
    environment: Mapping[str, str] = field(default_factory=dict)
    forget: Callable[[], None] = lambda: None
    """Makes the server look at the files again."""

    def config(self, *, lookup: Mapping[str, str] = REMEMBERING, **fields: Any) -> dict[str, Any]:
        """Return our config; ``fields`` are further top-level fields."""
        return tier_config({**self.tier, "lookup": dict(lookup)}, **fields)

    def shards(self) -> list[str]:
        """Return the names of all shards, sorted."""
        return sorted(name for name in self._names() if parse_shard_name(name))

    def namespaces(self) -> set[str]:
        """Return the namespaces that hold shards."""
        return {name.partition("/")[0] for name in self.shards()}

    def path(self, name: str) -> Path:
        """Return the file that holds a shard."""
        return self.directory / name

    def read(self, name: str) -> bytes:
        """Return what a shard holds."""
        return self.path(name).read_bytes()

    def write(self, name: str, data: bytes) -> None:
        """Replace what a shard holds, in place."""
        with self.path(name).open("r+b") as file:
            file.write(data)
            file.truncate()
        self.forget()

    def flip(self, name: str, position: int, mask: int = 0x01) -> None:
        """Change bits of one byte of a shard."""
        with self.path(name).open("r+b") as file:
            file.seek(position)
            byte = file.read(1)[0]
            file.seek(position)
            file.write(bytes([byte ^ mask]))
        self.forget()

    def delete(self, name: str) -> None:
        """Remove a shard."""
        self.path(name).unlink()
        self.forget()

    def snapshot(self) -> dict[str, bytes]:
        """Return everything that rests here, manifests included."""
        return {name: self.read(name) for name in self._names()}

    def _names(self) -> list[str]:
        paths = (path for path in self.directory.rglob("*") if path.is_file())
        names = (path.relative_to(self.directory).as_posix() for path in paths)
        return sorted(name for name in names if ".rclone_temp_put_" not in name and not name.startswith("."))


def bucket(server: RcloneServer, mover: str, *, prefix: str = PREFIX, **fields: Any) -> Medium:
    """A bucket, reached by ``mover``; ``fields`` are further fields of the tier."""
    return Medium(
        mover,
        server.tier(prefix, mover=mover, **fields),
        server.directory / prefix,
        server.environment,
        server.forget,
    )


def tree(path: Path, **fields: Any) -> Medium:
    """A shared directory."""
    return Medium("tree", tree_tier(path, **fields), path)


def token_bytes(shape: ModelShape = TINY) -> int:
    """Bytes of KV per token, of a model with one KV-cache group."""
    return 2 * shape.layers * shape.kv_heads * shape.head_size * 4


def hits(answers: list[Answer]) -> int:
    """Prompt tokens that came from the tier."""
    return sum(answer.external_hit_tokens for answer in answers)


def said(engine: Engine) -> str:
    """Return what our package wrote to the engine's log last, for messages of failed assertions."""
    lines = engine.log.read_text(errors="replace").splitlines()
    ours = ("tier", "not usable", "chunks:", "moved by", "Traceback", "Error")
    return "\n".join(["", *[line for line in lines if any(word in line for word in ours)][-25:]])


def until_stored(engine: Engine, medium: Medium, prompts: list[Prompt], shards: int) -> list[Answer]:
    """Ask until so many shards rest on the medium: a busy machine may shed a store. Returns the first answers."""
    first = engine.generate(prompts)
    assert engine.settle()
    deadline = time.monotonic() + RECOVERY_DEADLINE_S
    while len(medium.shards()) < shards:
        assert time.monotonic() < deadline, f"{len(medium.shards())} of {shards} shards are stored{said(engine)}"
        assert engine.reset_prefix_cache()
        engine.generate(prompts)
        assert engine.settle()
    return first


def until_loaded(reference: Reference, engine: Engine, prompts: list[Prompt]) -> None:
    """Ask until every full chunk comes from the tier, and nothing is refused. Each answer on the way is right."""

    def loaded() -> bool:
        refused = loads_refused(engine)
        answers = reference.check(engine, prompts)
        assert engine.settle()
        found = [answer.external_hit_tokens for answer in answers] == [FULL_TOKENS] * len(prompts)
        return found and loads_refused(engine) == refused

    deadline = time.monotonic() + RECOVERY_DEADLINE_S
    while not loaded():
        assert time.monotonic() < deadline, f"not every full chunk is loaded{said(engine)}"
        time.sleep(0.05)


def side_by_side(*works: Callable[[], object]) -> None:
    """Do several things at once, on a thread each, and raise what one of them raised once all are over.

    Most of the time goes by in waiting for deadlines and pauses. Engines are not shared between works; a ``Reference``
    may be once it knows all answers.
    """
    with ThreadPoolExecutor(len(works)) as pool:
        for done in [pool.submit(work) for work in works]:
            done.result()


def let_beliefs_lapse() -> None:
    """Wait until an engine that is to look each time will look again."""
    time.sleep(LOOK_EACH_TIME_S + 0.05)
