"""S3 servers for tests: rclone's, with TLS or without, grown by ways to damage what rests in its bucket; and moto's.

Threading and ownership: see ``examples.s3_server``, where what both have in common lives. ``MotoServer`` keeps its
objects in memory and forgets them when it is stopped.
"""

from __future__ import annotations

import contextlib
import datetime
import http.client
import os
import shutil
import socket
import ssl
import sys
from collections.abc import Iterator
from pathlib import Path

import trustme

from examples.s3_server import BUCKET, RcloneServer as PlainRcloneServer, S3Server, free_port

__all__ = [
    "BUCKET",
    "MotoServer",
    "RcloneServer",
    "S3Server",
    "TlsRclone",
    "free_port",
    "make_certificate",
    "make_contexts",
]

_START_S = 30.0


class RcloneServer(PlainRcloneServer):
    """``rclone serve s3`` over a directory: an object is a file, so that tests can damage what rests in the bucket.

    Signatures are verified, checksums of bodies are not. The server caches what directories hold for a second; the
    methods below make it look again. Of several first PUTs into one new directory it may answer one with a 500, which
    clients retry; where a test counts attempts, ``make_directories`` comes first.
    """

    def path(self, name: str) -> Path:
        """Return the file that holds object ``name``."""
        return self.directory / name

    def objects(self, prefix: str = "") -> list[str]:
        """Return the names of all objects that start with ``prefix``, as they lie on disk, sorted."""
        names = (path.relative_to(self.directory).as_posix() for path in self.directory.rglob("*") if path.is_file())
        return sorted(n for n in names if n.startswith(prefix) and ".rclone_temp_put_" not in n)

    def make_directories(self, *names: str) -> None:
        """Make directories, so that parallel PUTs into them need not."""
        for name in names:
            self.path(name).mkdir(parents=True, exist_ok=True)
        self.forget()

    def write(self, name: str, data: bytes) -> None:
        """Put an object behind the server's back."""
        self.path(name).parent.mkdir(parents=True, exist_ok=True)
        self.path(name).write_bytes(data)
        self.forget()

    def truncate(self, name: str, length_bytes: int) -> None:
        """Cut an object, or lengthen it with zeros."""
        os.truncate(self.path(name), length_bytes)
        self.forget()

    def flip(self, name: str, offset_bytes: int) -> None:
        """Flip one bit of the byte at ``offset_bytes`` (negative: from the end)."""
        path = self.path(name)
        offset = offset_bytes % path.stat().st_size
        with path.open("r+b") as file:
            file.seek(offset)
            byte = file.read(1)[0]
            file.seek(offset)
            file.write(bytes([byte ^ 0x10]))
        self.forget()

    def delete(self, name: str) -> None:
        """Remove an object behind the server's back."""
        self.path(name).unlink()
        self.forget()

    def empty(self) -> None:
        """Remove every object."""
        for path in self.directory.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        self.forget()

    def forget(self) -> None:
        """Make the server look at the directory again."""
        if self._process is None:
            return
        with _unix_connection(self._control) as connection:
            connection.request("POST", "/vfs/refresh?recursive=true")
            response = connection.getresponse()
            body = response.read()
        if response.status != http.client.OK:
            raise RuntimeError(f"rclone's vfs/refresh: {response.status} {body!r}")

    @property
    def _control(self) -> Path:
        return self.scratch / "control"

    def _command(self) -> list[str]:
        self._control.unlink(missing_ok=True)
        return [*super()._command(), "--rc", f"--rc-addr=unix://{self._control}", "--rc-no-auth"]


class TlsRclone(RcloneServer):
    """Speaks TLS alone; to a request without it, it answers 400, so the start is noticed all the same."""

    def __init__(self, certificate: Path, key: Path) -> None:
        super().__init__()
        self._files = (certificate, key)

    def _command(self) -> list[str]:
        certificate, key = self._files
        return [*super()._command(), f"--cert={certificate}", f"--key={key}"]


def make_certificate(directory: Path, name: str, *, expired: bool = False) -> tuple[Path, Path, Path]:
    """Make an authority and a certificate by it; return the certificate's file, its key's, the authority's."""
    day = datetime.timedelta(days=1)
    until = datetime.datetime.now(datetime.UTC) + (-day if expired else day)
    authority = trustme.CA()
    issued = authority.issue_cert(name, not_before=until - 3 * day, not_after=until)
    files = (directory / f"{name}.pem", directory / f"{name}.key", directory / f"{name}-authority.pem")
    issued.cert_chain_pems[0].write_to_path(files[0])
    issued.private_key_pem.write_to_path(files[1])
    authority.cert_pem.write_to_path(files[2])
    return files


def make_contexts(directory: Path) -> tuple[ssl.SSLContext, ssl.SSLContext, Path]:
    """Return contexts of a server at 127.0.0.1 and of a client that trusts it, and the authority's file."""
    certificate, key, authority = make_certificate(directory, "127.0.0.1")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return context, ssl.create_default_context(cafile=str(authority)), authority


class MotoServer(S3Server):
    """moto's server: a second opinion, above all on bucket administration. Accepts any signature; slow for data."""

    def start(self) -> None:
        """Start the process and make the bucket."""
        super().start()
        with contextlib.closing(self.client(timeout_s=_START_S)) as client:
            client.create_bucket(Bucket=self.bucket)

    def _command(self) -> list[str]:
        return [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]


@contextlib.contextmanager
def _unix_connection(path: Path) -> Iterator[http.client.HTTPConnection]:
    connection = http.client.HTTPConnection("localhost", timeout=10.0)
    connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.sock.settimeout(10.0)
        connection.sock.connect(str(path))
        yield connection
    finally:
        connection.close()
