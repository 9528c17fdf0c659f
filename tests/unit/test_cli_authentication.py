"""Commands beside ``authenticate``: verify and stat check MACs, say where they cannot, and go on without a key;
ls and gc need no key; nothing that is printed or logged has a key in it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from nixl_offload.chunk.authentication import ChunkKeys, key_id
from nixl_offload.chunk.checksum import block_checksum
from nixl_offload.chunk.header import HEADER_BYTES
from nixl_offload.cli.check.machine import keys_finding
from nixl_offload.config import load_config
from nixl_offload.identity.namespace import Namespace, make_namespace
from nixl_offload.stores.directory import TreeStore
from nixl_offload.tiers.shared.naming import shard_name
from tests.unit import shard_images
from tests.unit.stored_rig import Cli

KEY, OTHER = bytes(range(7, 39)), bytes(range(70, 102))
CHUNKS = range(6)


def signed(content: bytearray, first: int, key: bytes = KEY) -> bytearray:
    """Return a shard with a MAC."""
    image = np.frombuffer(content, dtype=np.uint8)
    payload = image[HEADER_BYTES:][: shard_images.BLOCKS * shard_images.BLOCK_BYTES]
    rows = payload.reshape(shard_images.BLOCKS, shard_images.BLOCK_BYTES)[first:]
    return bytearray(ChunkKeys([key]).signed(image[:HEADER_BYTES], rows).tobytes() + image[HEADER_BYTES:].tobytes())


class Directory:
    """A shared directory with signed chunks of one namespace, and a config for it."""

    def __init__(self, directory: Path, *, authenticated: bool = True) -> None:
        fields = shard_images.namespace().fields
        settings = {**fields.settings, "authenticate": "blake3 1"} if authenticated else fields.settings
        self.namespace: Namespace = make_namespace(replace(fields, settings=settings))
        self.store = TreeStore(str(directory / "shared"))
        shard_images.put_manifest(self.store, self.namespace)
        for number in CHUNKS:
            for rank in range(shard_images.RANKS):
                self.put(number, rank)
        self.keys = directory / "keys"
        self.say(KEY)
        self.shared = {"kind": "shared_dir", "path": str(directory / "shared"), "capacity": "64MiB"}
        self.file = directory / "kv.yaml"
        self.write({})

    def write(self, changes: dict[str, object], *tiers: dict[str, object]) -> Path:
        """Write the config, with ``authenticate`` unless ``changes`` say otherwise."""
        fields = {"authenticate": {"key_file": str(self.keys)}, "tiers": [*tiers, self.shared], **changes}
        said = {name: value for name, value in fields.items() if value is not None}
        self.file.write_text(yaml.safe_dump(said))
        return self.file

    def say(self, *keys: bytes) -> None:
        self.keys.touch(0o600)
        self.keys.write_text("".join(f"{key.hex()}\n" for key in keys))

    def put(self, number: int, rank: int, *, key: bytes | None = KEY) -> None:
        first = number % 3
        content = shard_images.image(self.namespace, number, rank, first_valid_block=first)
        self.store.write(self.name(number, rank), memoryview(content if key is None else signed(content, first, key)))

    def forge(self, number: int, rank: int) -> None:
        """Put another payload there, with right checksums, and the MAC of the shard that was there."""
        stored = np.fromfile(f"{self.store.where}/{self.name(number, rank)}", dtype=np.uint8)
        made = np.frombuffer(shard_images.image(self.namespace, number, rank, seed=99), dtype=np.uint8).copy()
        made[152:192] = stored[152:192]
        made[4088:4096] = np.frombuffer(block_checksum(made[:4088]).to_bytes(8, "little"), dtype=np.uint8)
        self.store.write(self.name(number, rank), memoryview(bytearray(made.tobytes())))

    def name(self, number: int, rank: int) -> str:
        return shard_name(self.namespace.name, shard_images.key(number), rank)


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
    for key in (KEY, OTHER):
        for shown in (key.hex(), repr(key)[2:30], str(list(key))[1:30]):
            assert shown not in made.said + caplog.text
            assert shown.upper() not in made.said + caplog.text


def totals(cli: Cli) -> dict[str, int]:
    found: dict[str, int] = cli.lines[-1]["tiers"][-1]["chunks"]
    return {kind: count for kind, count in found.items() if count}


def test_verify_checks_macs(directory: Directory, cli: Cli) -> None:
    assert cli("verify", directory.file, "--json") == 0
    assert totals(cli) == {"good": 6}
    directory.put(0, 0, key=None)
    directory.put(1, 1, key=OTHER)
    assert cli("verify", directory.file, "--json") == 1
    assert totals(cli) == {"good": 4, "bad": 1, "unauthenticated": 1}
    (line,) = cli.lines[:-1]
    assert [problem["reason"] for problem in line["problems"]] == ["authentication"]
    assert cli("verify", directory.file) == 1
    assert "there is no MAC" in cli.out
    assert "1 not authenticated: no key" in cli.out


def test_verify_finds_what_only_the_mac_tells(directory: Directory, cli: Cli) -> None:
    """An attacker who can write makes every checksum right, and has MACs of other chunks."""
    directory.forge(3, 1)
    assert cli("verify", directory.file, "--json") == 1
    assert totals(cli) == {"good": 5, "bad": 1}
    assert cli.lines[0]["problems"][0]["reason"] == "authentication"
    directory.write({"authenticate": None})
    assert cli("verify", directory.file, "--json") == 0, "all checksums are right"
    assert totals(cli) == {"unauthenticated": 6}


@pytest.mark.parametrize("how", ["not said", "not there", "exposed"])
def test_without_a_key_all_else_is_checked(directory: Directory, cli: Cli, how: str) -> None:
    if how == "not said":
        directory.write({"authenticate": None})
    elif how == "not there":
        directory.keys.unlink()
    else:
        directory.keys.chmod(0o644)
    assert cli("verify", directory.file) == 0
    assert "6 not authenticated: no key" in cli.out
    assert ("going on without a key" in cli.err) == (how != "not said")
    assert cli("stat", directory.file, shard_images.key(1).hex(), "--verify") == 0
    assert f"not authenticated: no key {key_id(KEY).hex()}" in cli.out
    assert cli("ls", directory.file, "--json") == 0
    assert cli("gc", directory.file) == 0
    path = Path(directory.store.where) / shard_name(directory.namespace.name, shard_images.key(2), 0)
    data = bytearray(path.read_bytes())
    data[HEADER_BYTES + 15_500] ^= 1
    path.write_bytes(data)
    assert cli("verify", directory.file) == 1
    assert "1 bad" in cli.out


def test_stat_says_whose_the_mac_is(directory: Directory, cli: Cli) -> None:
    assert cli("stat", directory.file, shard_images.key(1).hex(), "--verify") == 0
    assert key_id(KEY).hex() in cli.out
    assert "every block verifies\n" in cli.out
    directory.put(1, 0, key=None)
    assert cli("stat", directory.file, shard_images.key(1).hex(), "--verify") == 1
    assert "there is no MAC" in cli.out


def test_a_rotated_key(directory: Directory, cli: Cli) -> None:
    directory.say(OTHER, KEY)
    assert cli("verify", directory.file, "--json") == 0
    assert totals(cli) == {"good": 6}
    directory.say(OTHER)
    assert cli("verify", directory.file, "--json") == 0
    assert totals(cli) == {"unauthenticated": 6}


@pytest.mark.parametrize(
    "said", [KEY.hex(), {"key_file": KEY.hex()}, {"key": KEY.hex()}, {"key_file": [KEY.hex()]}, [KEY.hex()]]
)
def test_a_key_in_the_config_is_not_repeated(directory: Directory, cli: Cli, said: object) -> None:
    """By somebody who took the name of the file for the key."""
    directory.write({"authenticate": said})
    for command in ("verify", "show", "ls"):
        assert cli(command, directory.file) == 2
        assert "authenticate" in cli.err


def test_check_says_whether_the_keys_can_be_read(directory: Directory, cli: Cli) -> None:
    config = load_config(directory.file)
    assert config.authenticate is not None
    found = keys_finding(config.authenticate.key_file)
    assert (found.state, key_id(KEY).hex() in found.words) == ("ok", True)
    directory.keys.chmod(0o640 if os.geteuid() else 0o604)
    assert keys_finding(config.authenticate.key_file).state == "wrong"
    assert cli("check", directory.write({}), "--no-io", "--json") == 1
    assert "authenticate.key_file" in cli.out
