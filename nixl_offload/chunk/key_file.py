"""The file of secret keys that ``authenticate`` names.

Threading: one function, safe anywhere. No message repeats anything of the file.
"""

from __future__ import annotations

import os
import stat
from typing import Final

from nixl_offload.chunk.authentication import KEY_BYTES, ChunkKeys
from nixl_offload.errors import ConfigError

MAX_BYTES: Final = 1 << 16
_HOW: Final = f"one key a line, {2 * KEY_BYTES} hex digits, as by: openssl rand -hex {KEY_BYTES}"


def read_key_file(path: str) -> ChunkKeys:
    """Read the keys. Links are followed, for Kubernetes mounts secrets by them; what counts is the file at their end.

    Raises ConfigError: it cannot be read, is no file, is another user's, others may read or write it, or it does not
    have keys.
    """
    where = f"authenticate.key_file: {path}"
    try:
        # Not blocking: somebody may have put a FIFO there.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except OSError as error:
        raise ConfigError(f"{where}: cannot be read: {error.strerror}") from error
    try:
        _refuse_exposed(where, os.fstat(fd))
        content = os.read(fd, MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{where}: cannot be read: {error.strerror}") from error
    finally:
        os.close(fd)
    if len(content) > MAX_BYTES:
        raise ConfigError(f"{where}: is larger than {MAX_BYTES} bytes; allowed: {_HOW}")
    keys = []
    for number, line in enumerate(content.splitlines(), start=1):
        digits = line.strip()
        if not digits:
            continue
        try:
            key = bytes.fromhex(digits.decode("ascii"))
        except ValueError:
            key = b""
        # A text of one digit again and again is what somebody wrote to try it out.
        if len(digits) != 2 * KEY_BYTES or len(key) != KEY_BYTES or len(set(key)) == 1:
            raise ConfigError(f"{where}: line {number} is no key; allowed: {_HOW}") from None
        keys.append(key)
    if not keys:
        raise ConfigError(f"{where}: is empty; allowed: {_HOW}")
    return ChunkKeys(keys)


def _refuse_exposed(where: str, status: os.stat_result) -> None:
    """Raise ConfigError for a file that others than us, and root, can read or write."""
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"{where}: is not a regular file")
    if status.st_uid not in (os.geteuid(), 0):
        raise ConfigError(f"{where}: belongs to user {status.st_uid}; allowed: this user ({os.geteuid()}), or root")
    # Kubernetes gives a secret to a user by a group (fsGroup), in a file that stays root's.
    shared = stat.S_IRGRP if status.st_uid == 0 else 0
    exposed = stat.S_IMODE(status.st_mode) & 0o077 & ~shared
    if exposed:
        raise ConfigError(
            f"{where}: has mode {stat.S_IMODE(status.st_mode):04o}, so that others can read or write it; "
            "allowed: 0600 or 0400; a file of root's may be 0440"
        )
