"""The keyed MAC of a stored shard, and the key file. Somebody without a key can cause misses, and nothing else.

The MAC lies in the header page. It covers that page and all blocks of the shard, so no part of one shard can replace
a part of another. docs/format.md has the bytes, docs/decisions/0031-authentication.md the reasons.
Threading: immutable; safe anywhere. BLAKE3 releases the GIL while it reads blocks. No message repeats a key.
"""

from __future__ import annotations

import hmac
import os
import re
import stat
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from nixl_offload.chunk.checksum import block_checksum
from nixl_offload.chunk.header import HEADER_BYTES, OWN_CHECKSUM, OWN_CHECKSUM_AT, Buffer, bytes_of
from nixl_offload.errors import ConfigError, FormatError

KEY_BYTES: Final = 32
MAC_AT: Final = 152
KEY_ID_AT: Final = 184
KEY_ID_BYTES: Final = 8
SCHEME: Final = "blake3 1"
"""The value in the namespace if its chunks have MACs."""
_ID_CONTEXT: Final = "nixl-offload 2026-11 key id 1"
_ZERO_MAC: Final = bytes(KEY_ID_AT - MAC_AT)
_ZERO_END: Final = bytes(HEADER_BYTES - OWN_CHECKSUM_AT)
_FILE_MAX_BYTES: Final = 1 << 16
_FILE_HOW: Final = f"one key a line, {2 * KEY_BYTES} hex digits, as by: openssl rand -hex {KEY_BYTES}"


class ChunkKeys:
    """Secret keys: the first makes MACs, all verify. ``repr`` shows only their ids, which reveal nothing of a key."""

    __slots__ = ("_keys", "first_id")

    def __init__(self, keys: Sequence[bytes]) -> None:
        """``keys``: at least one, of 32 bytes each. Raises ValueError, whose message contains no key."""
        if not keys or any(len(key) != KEY_BYTES for key in keys):
            raise ValueError(f"one key or more, of {KEY_BYTES} bytes each, are needed")
        self._keys = {key_id(key): bytes(key) for key in keys}
        self.first_id = key_id(keys[0])
        """The id of the key that makes MACs."""

    def __repr__(self) -> str:
        return f"ChunkKeys({', '.join(known.hex() for known in self._keys)})"

    def __reduce__(self) -> str:
        raise TypeError("keys are read from their file by each process, and sent nowhere")

    def knows(self, page: Buffer) -> bool:
        """Whether a header page names one of the keys. Does not check its MAC."""
        return stated_key_id(page) in self._keys

    def signed(self, page: Buffer, blocks: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """Return a copy of a header page with a MAC by the first key, in place of any MAC that ``page`` has.

        ``blocks``: the blocks from the first valid one to the last; uint8 of shape (n, block_bytes), contiguous.
        """
        made = bytearray(bytes_of(page))
        made[KEY_ID_AT : KEY_ID_AT + KEY_ID_BYTES] = self.first_id
        mac = _begin(made, self._keys[self.first_id])
        mac.update(blocks.reshape(-1).data)
        made[MAC_AT:KEY_ID_AT] = mac.digest()
        OWN_CHECKSUM.pack_into(made, OWN_CHECKSUM_AT, block_checksum(memoryview(made)[:OWN_CHECKSUM_AT]))
        return np.frombuffer(made, dtype=np.uint8)

    def verify(self, page: Buffer, blocks: npt.NDArray[np.uint8]) -> None:
        """Raise FormatError, with reason ``authentication``, unless the MAC in ``page`` fits ``page`` and ``blocks``.

        ``page`` must have passed ``check_headers``; ``blocks`` as for ``signed``.
        """
        check = self.begin(page)
        check.update(blocks.reshape(-1).data)
        check.finish()

    def begin(self, page: Buffer) -> MacCheck:
        """Begin a ``verify`` of blocks that come in pieces."""
        view = bytes_of(page)
        stated = stated_key_id(view)
        key = self._keys.get(stated)
        if key is None:
            words = f"the MAC is by key {stated.hex()}, which is not in key_file" if any(stated) else "there is no MAC"
            raise FormatError(words, reason="authentication")
        return MacCheck(_begin(view, key), bytes(view[MAC_AT:KEY_ID_AT]))


class MacCheck:
    """A MAC check under way: pass it the blocks in order, then ask for the result."""

    def __init__(self, mac: blake3, stated: bytes) -> None:
        self._mac = mac
        self._stated = stated

    def update(self, piece: memoryview) -> None:
        """Take the next bytes of the blocks."""
        self._mac.update(piece)

    def finish(self) -> None:
        """Raise FormatError, with reason ``authentication``, unless the MAC is right."""
        if not hmac.compare_digest(self._mac.digest(), self._stated):
            raise FormatError(
                "the MAC does not fit header and blocks: somebody without the key has changed them",
                reason="authentication",
            )


def key_id(key: bytes) -> bytes:
    """Return the id by which headers name a key."""
    return blake3(key, derive_key_context=_ID_CONTEXT).digest(length=KEY_ID_BYTES)


def stated_key_id(page: Buffer) -> bytes:
    """Return the key id in a header page; all zeros if the page has no MAC."""
    return bytes(bytes_of(page)[KEY_ID_AT : KEY_ID_AT + KEY_ID_BYTES])


def _begin(page: memoryview | bytearray, key: bytes) -> blake3:
    """Hash the page first, with zeros in place of the MAC and of the page's own checksum."""
    mac = blake3(key=key)
    mac.update(bytes(page[:MAC_AT]) + _ZERO_MAC + bytes(page[KEY_ID_AT:OWN_CHECKSUM_AT]) + _ZERO_END)
    return mac


def read_key_file(path: str) -> ChunkKeys:
    """Read the keys of ``authenticate.key_file``. Links are followed, because Kubernetes mounts secrets as links.

    Raises ConfigError: the file cannot be read, is not regular, belongs or is open to other users, or has no keys.
    """
    where = f"authenticate.key_file: {path}"
    try:
        # O_NONBLOCK: the open must not hang if the path is a FIFO.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
        try:
            _refuse_exposed(where, os.fstat(fd))
            content = os.read(fd, _FILE_MAX_BYTES + 1)
        finally:
            os.close(fd)
    except OSError as error:
        raise ConfigError(f"{where}: cannot be read: {error.strerror}") from error
    if len(content) > _FILE_MAX_BYTES:
        raise ConfigError(f"{where}: is larger than {_FILE_MAX_BYTES} bytes; allowed: {_FILE_HOW}")
    keys = []
    for number, line in enumerate(content.splitlines(), start=1):
        if digits := line.strip():
            # A key of one repeated byte is a placeholder that somebody forgot to replace.
            if not re.fullmatch(rb"[0-9A-Fa-f]{64}", digits) or len({*bytes.fromhex(digits.decode())}) == 1:
                raise ConfigError(f"{where}: line {number} is no key; allowed: {_FILE_HOW}")
            keys.append(bytes.fromhex(digits.decode()))
    if not keys:
        raise ConfigError(f"{where}: is empty; allowed: {_FILE_HOW}")
    return ChunkKeys(keys)


def _refuse_exposed(where: str, status: os.stat_result) -> None:
    """Raise ConfigError for a file that a user other than this one and root can read or write."""
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"{where}: is not a regular file")
    if status.st_uid not in (os.geteuid(), 0):
        raise ConfigError(f"{where}: belongs to user {status.st_uid}; allowed: this user ({os.geteuid()}), or root")
    # Kubernetes mounts a secret as a file of root's that the pod's group (fsGroup) can read.
    shared = stat.S_IRGRP if status.st_uid == 0 else 0
    exposed = stat.S_IMODE(status.st_mode) & 0o077 & ~shared
    if exposed:
        raise ConfigError(
            f"{where}: has mode {stat.S_IMODE(status.st_mode):04o}, so that others can read or write it; "
            "allowed: 0600 or 0400; a file of root's may be 0440"
        )
