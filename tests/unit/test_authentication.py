"""MACs: their bytes are as docs/format.md says, only shards signed with a known key pass, keys are shown nowhere, and
a key file that other users can read or write is refused.
"""

from __future__ import annotations

import copy
import os
import pickle
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from blake3 import blake3

from nixl_offload.chunk.authentication import ChunkKeys, key_id, read_key_file, stated_key_id
from nixl_offload.chunk.checksum import block_checksums
from nixl_offload.errors import ConfigError, FormatError
from tests.headers import Expected, make_page

OLD, NEW, OTHER = (bytes(range(start, start + 32)) for start in (1, 101, 201))
EXPECT = Expected(bytes(32), b"k" * 36, 3, 4, 1000)
BLOCKS = np.random.default_rng(1).integers(0, 256, (4, 1000), dtype=np.uint8)


def page_of(blocks: npt.NDArray[np.uint8] = BLOCKS, first: int = 0) -> npt.NDArray[np.uint8]:
    """Return an ordinary header page."""
    return make_page(EXPECT, block_checksums(blocks[first:]), first_valid_block=first, created_s=7)


def refusal(keys: ChunkKeys, page: npt.NDArray[np.uint8], blocks: npt.NDArray[np.uint8] = BLOCKS) -> str:
    with pytest.raises(FormatError) as caught:
        keys.verify(page, blocks)
    assert caught.value.reason == "authentication"
    return str(caught.value)


def test_the_bytes_are_those_of_the_format() -> None:
    """Made here by BLAKE3 alone, as another program would."""
    page = ChunkKeys([OLD]).signed(page_of(), BLOCKS)
    covered = bytearray(page.tobytes())
    covered[152:184] = bytes(32)
    covered[4088:] = bytes(8)
    assert page[152:184].tobytes() == blake3(bytes(covered) + BLOCKS.tobytes(), key=OLD).digest()
    assert page[184:192].tobytes() == blake3(OLD, derive_key_context="nixl-offload 2026-11 key id 1").digest()[:8]
    unlike = np.flatnonzero(page != page_of())
    assert set(unlike) <= {*range(152, 192), *range(4088, 4096)}, "old readers find what they know where it was"


def test_every_byte_counts() -> None:
    keys = ChunkKeys([OLD])
    page = keys.signed(page_of(), BLOCKS)
    keys.verify(page, BLOCKS)
    for at in range(4088):  # the last eight are the page's own checksum, which anybody can compute
        changed = page.copy()
        changed[at] ^= 1
        refusal(keys, changed)
    for at in range(0, BLOCKS.size, 7):
        changed = BLOCKS.copy()
        changed.reshape(-1)[at] ^= 0x80
        refusal(keys, page, changed)
    refusal(keys, page, BLOCKS[:3])
    refusal(keys, page, np.concatenate([BLOCKS, BLOCKS[:1]]))


def test_blocks_that_were_not_stored_do_not_count() -> None:
    keys = ChunkKeys([OLD])
    page = keys.signed(page_of(first=2), BLOCKS[2:])
    keys.verify(page, BLOCKS[2:])
    refusal(keys, page, BLOCKS)


def test_keys_are_rotated() -> None:
    """The first makes MACs, all verify; with the old one gone its chunks are refused."""
    before, during, after = ChunkKeys([OLD]), ChunkKeys([NEW, OLD]), ChunkKeys([NEW])
    old, new = before.signed(page_of(), BLOCKS), during.signed(page_of(), BLOCKS)
    during.verify(old, BLOCKS)
    during.verify(new, BLOCKS)
    after.verify(new, BLOCKS)
    assert stated_key_id(new) == key_id(NEW) == during.first_id
    assert key_id(OLD).hex() in refusal(after, old)
    assert during.signed(old, BLOCKS).tobytes() == new.tobytes(), "signed anew"
    assert during.knows(old)
    assert not after.knows(old)
    assert "there is no MAC" in refusal(after, page_of())
    page = page_of()
    page[191] = 1
    assert "by key 0000000000000001, which is not in key_file" in refusal(after, page)


def test_keys_are_not_shown_and_not_sent() -> None:
    keys = ChunkKeys([OLD, NEW])
    shown = f"{keys!r} {keys} {keys.first_id.hex()}"
    assert key_id(OLD).hex() in shown
    for key in (OLD, NEW):
        assert key.hex() not in shown
        assert repr(key)[2:20] not in shown
    for send in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="sent nowhere"):
            send(keys)
    for wrong in ([], [b"secret!"], [OLD, b"secret!"]):
        with pytest.raises(ValueError, match="32 bytes") as caught:
            ChunkKeys(wrong)
        assert "secret!" not in str(caught.value)


# The file of keys


def key_file(directory: Path, content: str = f"{NEW.hex()}\n\n  {OLD.hex().upper()}  \r\n", mode: int = 0o600) -> Path:
    path = directory / "keys"
    path.write_text(content)
    path.chmod(mode)
    return path


def test_a_file_of_keys(tmp_path: Path) -> None:
    """Kubernetes mounts a secret behind links."""
    descriptors = len(os.listdir("/proc/self/fd"))
    (tmp_path / "..2026").mkdir()
    key_file(tmp_path / "..2026", mode=0o400)
    (tmp_path / "..data").symlink_to("..2026")
    (tmp_path / "keys").symlink_to("..data/keys")
    keys = read_key_file(str(tmp_path / "keys"))
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert keys.first_id == key_id(NEW)
    keys.verify(ChunkKeys([OLD]).signed(page_of(), BLOCKS), BLOCKS)
    largest = key_file(tmp_path, OLD.hex().ljust(1 << 16, "\n"))
    assert read_key_file(str(largest)).first_id == key_id(OLD)


@pytest.mark.parametrize(
    ("content", "mode", "words"),
    [
        ("", 0o600, "is empty"),
        (f"{OLD.hex()}\n{OLD.hex()[:-2]}\n", 0o600, "line 2 is no key"),
        (OLD.hex().replace("0", "x", 1), 0o600, "line 1 is no key"),
        ("00" * 32, 0o600, "line 1 is no key"),
        ("\xe9" * 64, 0o600, "line 1 is no key"),
        (OLD.hex().ljust((1 << 16) + 1, "\n"), 0o600, "is larger than 65536 bytes"),
        *((OLD.hex(), mode, f"mode {mode:04o}") for mode in (0o604, 0o620)),
        ("fifo", 0o600, "not a regular file"),
        ("/dev/zero", 0o600, "not a regular file"),
        (".", 0o600, "not a regular file"),
        ("nothing", 0o600, "No such file"),
    ],
)
def test_a_file_that_is_no_file_of_keys_is_refused_at_once(tmp_path: Path, content: str, mode: int, words: str) -> None:
    """The message repeats nothing of the file."""
    os.mkfifo(tmp_path / "fifo", 0o600)
    is_path = content in ("fifo", "/dev/zero", ".", "nothing")
    with pytest.raises(ConfigError, match=words) as caught:
        read_key_file(str(tmp_path / content if is_path else key_file(tmp_path, content, mode)))
    assert OLD.hex()[:16] not in str(caught.value)
    assert caught.value.__cause__ is None or isinstance(caught.value.__cause__, OSError)


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files to others")
@pytest.mark.parametrize(
    ("owner", "mode", "reader", "words"),
    [
        (0, 0o440, 0, None),
        (0, 0o440, 4711, None),
        (4711, 0o600, 0, "belongs to user 4711"),
        (4711, 0o600, 4711, None),
        (4711, 0o640, 4711, "mode 0640"),
        (4711, 0o601, 4711, "mode 0601"),
    ],
)
def test_whose_the_file_must_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: int, mode: int, reader: int, words: str | None
) -> None:
    """It must be ours or root's. A group may read root's file: Kubernetes mounts secrets like that."""
    path = key_file(tmp_path, mode=mode)
    os.chown(path, owner, -1)
    monkeypatch.setattr(os, "geteuid", lambda: reader)
    if words is None:
        read_key_file(str(path))
    else:
        with pytest.raises(ConfigError, match=words):
            read_key_file(str(path))
