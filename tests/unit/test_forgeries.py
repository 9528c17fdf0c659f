"""With ``authenticate``, forged shards and manifests in a shared tier are misses that touch no KV block and take no
memory. Those that checksums cannot find are given to a server without ``authenticate`` too, which must be fooled: else
the attack is none.
"""

from __future__ import annotations

import itertools
import json
import os
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from nixl_offload.chunk.authentication import ChunkKeys
from nixl_offload.chunk.header import MAGIC, slot_bytes
from nixl_offload.engine import Chunk
from nixl_offload.identity.namespace import make_namespace
from nixl_offload.movers.threaded import CopyMover
from nixl_offload.stores.directory import TreeStore
from nixl_offload.tiers.shared.naming import shard_name
from nixl_offload.types import Outcome
from tests.unit.chain_rig import make_host
from tests.unit.engine_rig import CHUNK_BLOCKS, NAMESPACE, NUM_BLOCKS, SHAPES, Rig
from tests.unit.forgeries import FORGERIES, PAGE, PROMISED_BYTES, REFUSED, Loot, promising
from tests.unit.link_rig import NAMESPACE_NAME, object_files, objects, tree
from tests.unit.stored_rig import BLOCKS, Cli, put_image, stored_namespace

TARGET: Final = 5
EMPTY: Final = 0xEE


@contextmanager
def taking_no_memory(name: str) -> Iterator[None]:
    """Fail if the process asks for as much as a forged header promises; what is never touched counts, too."""

    def peak_bytes() -> int:
        status = Path("/proc/self/status").read_text()
        return int(next(line for line in status.splitlines() if line.startswith("VmPeak:")).split()[1]) << 10

    before_bytes = peak_bytes()
    yield
    assert peak_bytes() - before_bytes < PROMISED_BYTES // 2, name


class Servers:
    """Ranks of servers, with directories of their own or that of the target."""

    def __init__(self, stack: ExitStack, root: Path, kind: str, shape: str) -> None:
        self._stack, self._root, self._kind, self._shape = stack, root, kind, shape
        self._number = itertools.count()
        self._jobs = itertools.count(1)
        self._places: dict[int, Path] = {}
        drawn = random.Random(f"{kind} {shape}")
        self.random, self.group = drawn, drawn.randrange(len(SHAPES[shape].groups))

    def make(self, keys: ChunkKeys | None, at: str = "", **options: Any) -> Rig:
        """Start a server. ``at``: a directory shared with other servers."""
        number = next(self._number)
        place = self._root / (at or f"own-{number}")
        place.mkdir(exist_ok=True)
        is_tree = self._kind == "shared_dir"
        link = tree(place) if is_tree else objects()
        mover = CopyMover() if is_tree else object_files(place)
        rig = Rig(place, self._shape, mover, link=link, keys=keys, seed=number, **options)
        self._places[id(rig)] = place
        return self._stack.enter_context(closing(rig))

    def file(self, rig: Rig, number: int = TARGET, shard: int = 0) -> Path:
        """Return where a shard is stored."""
        name = shard_name(NAMESPACE_NAME, rig.key(number, self.group), shard)
        return self._places[id(rig)] / name

    def stored(self, rig: Rig, number: int = TARGET, shard: int = 0) -> bytes:
        """Store a chunk; return its shard."""
        blocks = range(number, number + CHUNK_BLOCKS)
        assert rig.store(next(self._jobs), [rig.chunk(number, blocks, group=self.group)]) == (Outcome.OK,)
        return self.file(rig, number, shard).read_bytes()

    def load(self, rig: Rig, way: str, begin: int = 0) -> tuple[Outcome, bytes]:
        """Load the target from block ``begin`` on; return what became of it, and the bytes that came."""
        rig.wipe(EMPTY)
        blocks = list(range(10, 10 + CHUNK_BLOCKS - begin))
        chunk = rig.chunk(TARGET, blocks, group=self.group, first=begin)
        if way == "promotion":
            chunk = Chunk(chunk.key, chunk.location, chunk.group, chunk.block_ids, chunk.first_block, 0)
        (result,) = rig.load(next(self._jobs), [chunk])
        assert {*rig.bytes_of(sorted({*range(NUM_BLOCKS)} - {*blocks}), self.group)} == {EMPTY}
        return result, rig.bytes_of(blocks, self.group)


@pytest.mark.parametrize("shape", ["two_groups", "direct_blocks"])
@pytest.mark.parametrize("way", ["load", "promotion"])
@pytest.mark.parametrize("kind", ["shared_dir", "s3"])
def test_forged_shards_are_misses(tmp_path: Path, kind: str, way: str, shape: str) -> None:
    with ExitStack() as stack:
        servers = Servers(stack, tmp_path, kind, shape)
        drawn = servers.random
        known, retired, attackers = (drawn.randbytes(32) for _ in range(3))
        keys = ChunkKeys([known])
        writer = servers.make(keys, "target")
        loot = Loot(
            target=servers.stored(writer),
            other_key=servers.stored(writer, TARGET + 1),
            other_namespace=servers.stored(servers.make(keys, namespace=bytes(reversed(NAMESPACE)))),
            other_shard=servers.stored(servers.make(keys, namespace=bytes([9]) * 32, shard=1), shard=1),
            retired=servers.stored(servers.make(ChunkKeys([retired]))),
            unsigned=servers.stored(servers.make(None)),
            attackers_key=attackers,
            random=drawn,
        )
        path, wanted = servers.file(writer), writer.bytes_of(range(TARGET, TARGET + CHUNK_BLOCKS), servers.group)
        hosts = [make_host(writer.location(0).slot_bytes, memory_slots=2) for _ in range(2)]
        stack.callback(lambda: [host.close() for host in hosts])
        host, other_host = hosts if way == "promotion" else (None, None)
        # As in the middle of a rotation: another key signs.
        reader = servers.make(ChunkKeys([drawn.randbytes(32), known]), "target", host=host)
        fooled = servers.make(None, "target", host=other_host)
        for name, attack in REFUSED.items():
            path.write_bytes(attack(loot))
            with taking_no_memory(name):
                result, found = servers.load(reader, way, drawn.randrange(CHUNK_BLOCKS))
            assert (result is Outcome.OK, {*found}) == (False, {EMPTY}), name
            if host is not None and result is Outcome.CORRUPT:
                assert bytes(host.slot(0, PAGE).memory[: len(MAGIC)]) != MAGIC, f"{name} stays in memory"
            if name in FORGERIES:
                result, found = servers.load(fooled, way)
                assert result is Outcome.OK, name
                assert found != wanted, name
        path.write_bytes(loot.target + drawn.randbytes(PAGE))
        result, found = servers.load(reader, way)
        assert found == (wanted if result is Outcome.OK else bytes([EMPTY]) * len(wanted)), "longer"
        # An earlier chunk of a server with the key is served: it was computed from the same tokens.
        path.write_bytes(loot.target)
        assert servers.load(reader, way) == (Outcome.OK, wanted)
        writer.wipe(7)
        path.write_bytes(b"")
        assert servers.stored(writer)[PAGE : PAGE + 8] == bytes([7]) * 8, "it is stored anew"


def _with(**fields: Any) -> Callable[[dict[str, Any]], object]:
    return lambda manifest: {**manifest, "fields": {**manifest["fields"], **fields}}


FORGED: Final[dict[str, Callable[[dict[str, Any]], object]]] = {
    "no authenticate": lambda manifest: manifest["fields"]["settings"].pop("authenticate") and manifest,
    **{f"{n!r:.9} shards": _with(shards=n) for n in (10**9, -1, 10**400, 1e308, "1", None, True, [], {})},
    "no groups": _with(groups=[]),
    "text for groups": _with(groups="x"),
    "large groups": _with(groups=[{"group_id": 0, "slot_bytes": [2**62] * 1000}]),
    "many groups": _with(groups=[None] * 10**5),
    "another's name": lambda manifest: {**manifest, "namespace": "../../etc"},
    "a name for terminals": lambda manifest: {**manifest, "namespace": "\x1b[2J"},
    "a number for a name": lambda manifest: {**manifest, "namespace": 7},
    "a list": lambda _: [],
    "lists for fields": lambda _: {"fields": []},
    "lists for settings": lambda _: {"fields": {"settings": []}},
}


def _write(data: bytes, path: Path) -> None:
    path.write_bytes(data)


PLANTED: Final[dict[str, Callable[[Path], object]]] = {
    **{
        f"bytes {data[:9]!r}": partial(_write, data)
        for data in (b"", b"\xff\xfe", b"[" * 200_000, b'{"fields":' * 50_000, b"9" * 100_000)
    },
    **{
        f"a link to {to}": partial(os.symlink, to)
        for to in ("/etc/passwd", "/dev/zero", "manifest.json", "/proc/self/environ")
    },
    "a terabyte": lambda path: (path.touch(), os.truncate(path, 1 << 40)),  # no space is taken
    "a pipe": os.mkfifo,
    "a directory": os.mkdir,
}


def test_forged_manifests_are_not_believed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Chunks of an authenticated namespace that have no MAC are never called good, with any manifest beside them."""
    fields, cli, root = stored_namespace().fields, Cli(capsys), tmp_path / "shared"
    signed = make_namespace(replace(fields, settings={**fields.settings, "authenticate": "blake3 1"}))
    plain, keys, file = stored_namespace(), tmp_path / "keys", tmp_path / "kv.yaml"
    keys.touch(0o600)
    keys.write_text(random.Random(1).randbytes(32).hex())

    def verified(namespace: str, *, authenticate: bool = True) -> dict[str, int]:
        said = {"authenticate": {"key_file": str(keys)}} if authenticate else {}
        tier = {"kind": "shared_dir", "path": str(root), "capacity": "64MiB"}
        file.write_text(yaml.safe_dump({**said, "tiers": [tier]}))
        assert cli("verify", file, "--namespace", namespace, "--json") in (0, 1)
        return {kind: count for kind, count in cli.lines[-1]["tiers"][0].get("chunks", {}).items() if count}

    with closing(TreeStore(str(root))) as store:
        for namespace in (signed, plain):
            put_image(store, namespace, 1)
        path = root / signed.name / "manifest.json"
        genuine = json.dumps(signed.manifest())
        texts = {name: json.dumps(forge(json.loads(genuine))) for name, forge in FORGED.items()}
        plants = {name: partial(_write, text.encode()) for name, text in texts.items()}
        for name, plant in {**plants, **PLANTED}.items():
            plant(path)
            assert "good" not in verified(signed.name), name
            for command in ("ls", "gc"):
                assert cli(command, file) in (0, 1), name
                assert "\x1b" not in cli.out
            (path.rmdir if path.is_dir() else path.unlink)()
        path.write_text(genuine)
        assert verified(signed.name) == {"bad": 1}
        path = root / plain.name / "manifest.json"
        path.write_text(json.dumps(plain.manifest()))
        assert verified(plain.name, authenticate=False) == {"good": 1}, "so it is the MAC that was missed"
        # A shard of which header and length say that it is large: by a manifest that says otherwise, then without one.
        shard = root / put_image(store, plain, 3)[0]
        shard.write_bytes(promising(shard.read_bytes()))
        os.truncate(shard, slot_bytes(BLOCKS, PROMISED_BYTES // BLOCKS))
        for name in ("with a manifest", "without"):
            with taking_no_memory(name):
                assert verified(plain.name, authenticate=False) == {"good": 1, "bad": 1}
            path.unlink(missing_ok=True)
