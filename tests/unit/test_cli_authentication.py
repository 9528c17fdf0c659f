"""Commands beside ``authenticate``: verify and stat check MACs, say where they cannot, and go on without a key;
ls and gc need no key; nothing that is printed or logged has a key in it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import yaml

from nixl_offload.chunk.authentication import ChunkKeys, key_id
from nixl_offload.chunk.checksum import block_checksum
from nixl_offload.chunk.header import HEADER_BYTES
from nixl_offload.identity.namespace import make_namespace
from nixl_offload.stores.directory import TreeStore
from nixl_offload.tiers.shared.naming import shard_name
from tests.unit.stored_rig import BLOCK_BYTES, BLOCKS, RANKS, Cli, flip, image, key, put_manifest, stored_namespace

KEY, OTHER = bytes(range(7, 39)), bytes(range(70, 102))
CHUNKS = range(6)


class Directory:
    """A shared directory with signed chunks of one namespace, and a config for it."""

    def __init__(self, directory: Path) -> None:
        fields = stored_namespace().fields
        self.namespace = make_namespace(replace(fields, settings={**fields.settings, "authenticate": "blake3 1"}))
        self.root, self.keys, self.file = directory / "shared", directory / "keys", directory / "kv.yaml"
        self.store = TreeStore(str(self.root))
        put_manifest(self.store, self.namespace)
        for number, rank in product(CHUNKS, range(RANKS)):
            self.put(number, rank, KEY)
        self.say(KEY)
        self.write({"key_file": str(self.keys)})

    def write(self, authenticate: object) -> None:
        """Write the config; None: without ``authenticate``."""
        tier = {"kind": "shared_dir", "path": str(self.root), "capacity": "64MiB"}
        said = {} if authenticate is None else {"authenticate": authenticate}
        self.file.write_text(yaml.safe_dump({**said, "tiers": [tier]}))

    def say(self, *secrets: bytes) -> None:
        self.keys.touch(0o600)
        self.keys.write_text("".join(f"{secret.hex()}\n" for secret in secrets))

    def path(self, number: int, rank: int) -> Path:
        return self.root / shard_name(self.namespace.name, key(number), rank)

    def put(self, number: int, rank: int, secret: bytes | None) -> None:
        """Store a shard with a MAC by ``secret``, or without one."""
        content = image(self.namespace, number, rank, first_valid_block=number % 3)
        if secret is not None:
            whole = np.frombuffer(content, dtype=np.uint8)
            payload = whole[HEADER_BYTES:][: BLOCKS * BLOCK_BYTES].reshape(BLOCKS, BLOCK_BYTES)
            page = ChunkKeys([secret]).signed(whole[:HEADER_BYTES], payload[number % 3 :])
            content[:HEADER_BYTES] = page.tobytes()
        self.store.write(shard_name(self.namespace.name, key(number), rank), memoryview(content))

    def forge(self, number: int, rank: int) -> None:
        """Replace the payload, with correct checksums and the MAC of the old shard."""
        made = image(self.namespace, number, rank, seed=99)
        made[152:192] = self.path(number, rank).read_bytes()[152:192]
        made[4088:4096] = block_checksum(memoryview(made)[:4088]).to_bytes(8, "little")
        self.path(number, rank).write_bytes(made)


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Directory]:
    made = Directory(tmp_path)
    yield made
    made.store.close()


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> Iterator[Cli]:
    """Nothing that a command prints or logs at DEBUG has a key in it."""
    caplog.set_level(logging.DEBUG)

    class Searched(Cli):
        said = ""

        def __call__(self, *arguments: object) -> int:
            code = super().__call__(*arguments)
            self.said += self.out + self.err
            return code

    made = Searched(capsys)
    yield made
    for secret in (KEY, OTHER):
        for shown in (secret.hex(), secret.hex().upper(), repr(secret)[2:30], str(list(secret))[1:30]):
            assert shown not in made.said + caplog.text


def verified(cli: Cli, directory: Directory) -> tuple[dict[str, int], list[str]]:
    """Return the number of chunks by verdict, and the faults of bad ones."""
    code = cli("verify", directory.file, "--json")
    *bad, totals = cli.lines
    found = {kind: count for kind, count in totals["tiers"][0]["chunks"].items() if count}
    assert code == ("bad" in found)
    return found, [problem["reason"] for line in bad for problem in line["problems"]]


def test_verify_finds_what_only_the_mac_tells(directory: Directory, cli: Cli) -> None:
    """An attacker who can write makes every checksum correct, and has MACs of other chunks."""
    assert verified(cli, directory) == ({"good": 6}, [])
    directory.put(0, 0, None)
    directory.put(1, 1, OTHER)
    directory.forge(3, 1)
    assert verified(cli, directory) == ({"good": 3, "bad": 2, "unauthenticated": 1}, ["authentication"] * 2)
    assert cli("verify", directory.file) == 1
    assert "there is no MAC" in cli.out
    assert "1 not authenticated: no key" in cli.out
    directory.put(0, 0, KEY)
    directory.write(None)
    assert verified(cli, directory) == ({"unauthenticated": 6}, []), "all checksums are right"


@pytest.mark.parametrize("how", ["not said", "not there", "exposed"])
def test_without_a_key_all_else_is_checked(directory: Directory, cli: Cli, how: str) -> None:
    if how == "not said":
        directory.write(None)
    elif how == "not there":
        directory.keys.unlink()
    else:
        directory.keys.chmod(0o644)
    assert verified(cli, directory) == ({"unauthenticated": 6}, [])
    assert ("going on without a key" in cli.err) == (how != "not said")
    assert cli("stat", directory.file, key(1).hex()) == 0
    assert f"not authenticated: no key {key_id(KEY).hex()}" in cli.out
    assert cli("ls", directory.file, "--json") == 0
    assert cli("gc", directory.file) == 0
    flip(directory.path(2, 0), HEADER_BYTES + 15_500)
    assert verified(cli, directory) == ({"unauthenticated": 5, "bad": 1}, ["checksum"])


def test_stat_says_whose_the_mac_is_and_keys_are_rotated(directory: Directory, cli: Cli) -> None:
    assert cli("stat", directory.file, key(1).hex()) == 0
    assert key_id(KEY).hex() in cli.out
    assert "every block verifies\n" in cli.out
    for keys, kind in (((OTHER, KEY), "good"), ((OTHER,), "unauthenticated")):
        directory.say(*keys)
        assert verified(cli, directory) == ({kind: 6}, [])
    directory.put(1, 0, None)
    assert cli("stat", directory.file, key(1).hex()) == 1
    assert "there is no MAC" in cli.out


def test_check_says_whether_the_keys_can_be_read(directory: Directory, cli: Cli) -> None:
    for mode, code, words in ((0o600, 0, f"signed by key {key_id(KEY).hex()}"), (0o604, 1, "authenticate.key_file")):
        directory.keys.chmod(mode if os.geteuid() == 0 or mode == 0o600 else 0o640)
        assert cli("check", directory.file, "--json") == code
        (found,) = (each for each in cli.json["sections"][0]["findings"] if each["name"] == "keys")
        assert words in found["words"]
