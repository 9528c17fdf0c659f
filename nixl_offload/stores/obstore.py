"""A bucket over obstore (Rust's object_store), with reads by ``http_get``. No other module uses obstore.

Threading: as ``base.Store``. The I/O runs on obstore's own runtime, which does not survive a fork: make the store in
the process that uses it. Ownership: a call uses the caller's memory only until it returns.

obstore's errors quote the server's whole answer, which may contain the signed request. So errors are parsed and
rebuilt: neither the text nor the cause of a StoreError from here contains an answer's body.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, TypeVar

import obstore
from obstore.auth.boto3 import Boto3CredentialProvider
from obstore.exceptions import BaseError
from obstore.store import S3Store

from nixl_offload.config.schema import S3Config
from nixl_offload.errors import StoreError
from nixl_offload.stores.base import ObjectInfo, Store
from nixl_offload.stores.http_get import DirectGets
from nixl_offload.stores.s3 import (
    ATTEMPTS,
    CONNECT_TIMEOUT_S,
    NO_CREDENTIALS,
    S3Address,
    answer_error,
    hush_botocore,
    printable,
)

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

LIST_PAGE: Final = 1000
"""Objects per page of a listing, and per bulk delete: S3's maximum of both."""
CREDENTIALS_RETRY_S: Final = 5.0
"""Pause before asking the AWS chain again, if it had no keys or denied ones. Asking may take seconds."""
_CREDENTIALS_TTL: Final = timedelta(minutes=8)
"""botocore renews temporary credentials ten minutes before they expire, so they are always valid for this long."""
_SIGNED_FOR: Final = timedelta(minutes=15)
"""Lifetime of presigned URLs: enough for clock skew, but short, because anybody with the URL can read the object."""

_STATUS: Final = re.compile(r"^ *status: (\d{3}),$", re.MULTILINE)
_KIND: Final = re.compile(r"^ *kind: (Connect|Timeout|Interrupted|Request|Decode|Unknown),$", re.MULTILINE)
_CODE: Final = re.compile(r"""(?:<Code>|^ *code: ")([A-Za-z0-9]{1,64})(?:</Code>|",$)""", re.MULTILINE)
_MESSAGE: Final = re.compile(r"<Message>([^<>]{1,200})</Message>")
_OS_MESSAGE: Final = re.compile(r'^ *message: "([^"]{1,200})",$', re.MULTILINE)


class BucketStore(Store):
    """An S3 bucket, reached by one ``S3Store`` with credentials of boto3's chain. The first call makes the client.

    botocore renews keys that expire, but reads those in the environment and ``~/.aws/credentials`` only once. So when a
    call is denied, the chain is asked again, and later calls use its new keys.
    """

    name = "obstore"

    def __init__(self, tier: S3Config) -> None:
        """Does not access the network."""
        self._tier = tier
        self._address = S3Address.of(tier)
        self.where = self._address.where
        self._lock = threading.Lock()
        self._made: tuple[S3Store, _Provider, S3Store | None] | None = None
        """The client, its credentials, and over TLS a second client that does not sign payloads: hashing them costs
        more than TLS, which protects them as well."""
        self._takes_unsigned: bool | None = None
        """Whether the server takes unsigned payloads. None: not tried yet."""
        self._ask_chain_at_s = 0.0
        self._closed = False
        self._direct = DirectGets(timeout_s=tier.request_timeout_s, tls=self._address.tls_context)

    def head(self, name: str) -> ObjectInfo | None:
        """Return the object's metadata, None if it is absent. A missing bucket gives None too; a write reports it."""

        def look(store: S3Store) -> ObjectInfo | None:
            with suppress(FileNotFoundError):  # the answer to most probes; an error of ours would be too slow
                return self._info(obstore.head(store, self._address.key(name)))
            return None

        return self._call(f"HEAD {name}", look)

    def read_into(self, name: str, offset: int, memory: memoryview) -> None:
        self._call(f"GET {name}", self._read_into, name, offset, memory.cast("B"))

    def write(self, name: str, memory: memoryview) -> None:
        self._call(f"PUT {name}", self._put, self._address.key(name), memory.cast("B"))

    def delete(self, names: Sequence[str]) -> None:
        first: StoreError | None = None
        for start in range(0, len(names), LIST_PAGE):
            batch = [self._address.key(name) for name in names[start : start + LIST_PAGE]]
            more = f" and {len(batch) - 1} more" if len(batch) > 1 else ""
            try:
                self._call(f"DELETE {names[start]}{more}", obstore.delete, batch)
            except StoreError as error:
                if error.cause != "missing":  # some servers answer 404 to the delete of a single object
                    first = first or error
        if first is not None:
            raise first

    def list(self, directory: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        doing, where = f"LIST {directory}".rstrip(), self._address.key(directory).rstrip("/") or None
        offset, page = self._address.key(start_after) if start_after else None, list[Any]()

        def next_page(store: S3Store) -> Any:
            return next(obstore.list(store, where, offset=offset, chunk_size=LIST_PAGE), [])

        while True:
            last = page and page[-1]
            page = self._call(doing, next_page)
            if page and page[-1] == last:
                text = "the server begins again with a page that it has sent: not S3?"
                raise StoreError(f"{self.where}: {doing}: {text}", cause="server")
            yield from map(self._info, page)
            if len(page) < LIST_PAGE:
                return
            offset = page[-1]["path"]

    def close(self) -> None:
        with self._lock:
            self._closed, self._made = True, None
        self._direct.close()

    def _put(self, store: S3Store, key: str, memory: memoryview) -> None:
        """Write with an unsigned payload if possible. If the first one is refused and ``store`` is not, sign them."""
        made = self._made
        if made is not None and made[2] is not None and self._takes_unsigned is not False:
            try:
                obstore.put(made[2], key, memory, use_multipart=False)
                self._takes_unsigned = True
                return
            except BaseError as error:
                if self._takes_unsigned or self._parsed("PUT", str(error)).cause not in {"denied", "io"}:
                    raise
        obstore.put(store, key, memory, use_multipart=False)
        self._takes_unsigned = False

    def _read_into(self, store: S3Store, name: str, offset: int, memory: memoryview) -> None:
        """Read directly if possible, else by obstore; if that breaks off, once more by obstore."""
        goes_directly = bool(memory.nbytes) and not self._direct.is_off
        if goes_directly:
            url = obstore.sign(store, "GET", self._address.key(name), _SIGNED_FOR)
            if self._direct.read_into(url, offset, memory):
                return
            self._client()  # raises when closed
        if not any(self._read_by_obstore(store, name, offset, memory) for _ in range(1 if goes_directly else 2)):
            text = f"{self.where}: GET {name}: the body ended early"
            raise StoreError(text, cause="unreachable") from BaseError("the body ended early")
        if goes_directly:
            self._direct.pause()  # the server answers obstore alone

    def _read_by_obstore(self, store: S3Store, name: str, offset: int, memory: memoryview) -> bool:
        """Copy the body into ``memory``; return False if it breaks off. If the server sends the whole object, skip the
        bytes before ``offset``.

        obstore itself resumes a body by a range, which not every server supports.
        """
        key, end, result = self._address.key(name), offset + memory.nbytes, None
        if memory.nbytes:
            try:
                result = obstore.get(store, key, options={"range": (offset, end)})
            except BaseError as error:  # rclone answers a range with status 200, which obstore refuses
                if "source: NotPartial" not in str(error):
                    raise
        result = result or obstore.get(store, key)
        begin, stop = result.range
        if stop < end:
            text = f"{memory.nbytes} bytes asked for at offset {offset}, there are {max(0, stop - offset)}"
            raise StoreError(f"{self.where}: GET {name}: {text}", cause="short")
        filled, skip = 0, offset - begin
        try:
            # A body that ends at ``end`` is read to its end, without which its connection could not be reused.
            for chunk in result.stream(min_chunk_size=1 << 20):
                view = memoryview(chunk)[skip:][: memory.nbytes - filled]
                skip = max(0, skip - len(chunk))
                memory[filled : filled + view.nbytes] = view
                filled += view.nbytes
                if stop > end and filled == memory.nbytes:
                    break
        except BaseError as error:
            if "kind: Timeout" in str(error):
                raise
            return False
        return filled == memory.nbytes

    def _info(self, found: Any) -> ObjectInfo:
        name = found["path"][len(self._address.prefix) :]
        return ObjectInfo(name, int(found["size"]), found["last_modified"].timestamp())

    def _call(self, doing: str, function: Callable[..., _T], *arguments: Any, **options: Any) -> _T:
        """Call ``function`` with the client as its first argument. Raises only StoreError."""
        store = self._client()
        try:
            return function(store, *arguments, **options)
        except StoreError:
            raise
        except (BaseError, OSError, ValueError) as error:
            foreign = error
        # Outside the handler, so that the original error, which quotes the answer, is neither cause nor context.
        failure = self._parsed(doing, str(foreign))
        if failure.cause == "denied":
            self._renew(store)
        raise failure from BaseError(str(failure).partition(": ")[2])

    def _parsed(self, doing: str, text: str) -> StoreError:
        """Translate the text of obstore's error. Of the answer, keep only status, code and message."""
        begin = f"{self.where}: {doing}: "
        status, code, message, kind, system = (
            found[1] if (found := pattern.search(text)) else ""
            for pattern in (_STATUS, _CODE, _MESSAGE, _KIND, _OS_MESSAGE)
        )
        if code or status:  # a bulk delete has errors inside an answer with status 200
            return answer_error(doing, self._address, int(status or 200), code, message)
        why = f" ({system})" if system else ""
        if kind == "Timeout":
            late = f"no answer within {self._tier.request_timeout_s:g} s, {ATTEMPTS} times"
            return StoreError(begin + late, cause="timeout")
        if kind == "Connect":
            hint = "; set ca_bundle if the server has its own certificate authority" if "ertificate" in text else ""
            return StoreError(f"{begin}cannot connect{why}{hint}", cause="unreachable")
        if kind:
            return StoreError(f"{begin}the connection broke{why}", cause="unreachable")
        if "redirect" in text:
            return StoreError(f"{begin}redirected; the bucket may be in another region: set region", cause="io")
        if "redential" in text:
            return StoreError(begin + NO_CREDENTIALS, cause="denied")
        words = "refused" if "<" in text else printable(text.partition("\n")[0][:200])
        return StoreError(begin + words, cause="io")

    def _client(self) -> S3Store:
        made = self._made
        if made is None:
            with self._lock:
                if self._closed:
                    raise StoreError(f"{self.where}: the store is closed", cause="io")
                made = self._made = self._made or self._make(self._ask_chain())
        return made[0]

    def _renew(self, denied: S3Store) -> None:
        """Replace the client ``denied`` if the chain has other keys now; otherwise keep it."""
        if not self._lock.acquire(blocking=False):
            return  # another thread is doing it
        try:
            made = self._made
            if made is None or made[0] is not denied or hasattr(made[1].credentials, "refresh_needed"):
                return  # botocore renews temporary keys by itself
            with suppress(StoreError):
                provider = self._ask_chain()
                self._ask_chain_at_s = time.monotonic() + CREDENTIALS_RETRY_S
                if provider.keys != made[1].keys:
                    self._made = self._make(provider)
        finally:
            self._lock.release()

    def _ask_chain(self) -> _Provider:
        hush_botocore()
        why = ""
        if time.monotonic() >= self._ask_chain_at_s:
            try:
                return _Provider(ttl=_CREDENTIALS_TTL)
            except Exception as error:  # noqa: BLE001  any error of the chain; its text may contain a secret
                self._ask_chain_at_s = time.monotonic() + CREDENTIALS_RETRY_S
                why = "" if isinstance(error, ValueError) else f" ({type(error).__name__})"
        raise StoreError(f"{self.where}: {NO_CREDENTIALS}{why}", cause="denied")

    def _make(self, provider: _Provider) -> tuple[S3Store, _Provider, S3Store | None]:
        tier, address = self._tier, self._address
        timeout = timedelta(seconds=tier.request_timeout_s)
        address.require_ca_bundle()
        client: Any = {
            "timeout": timeout,
            "connect_timeout": min(timeout, timedelta(seconds=CONNECT_TIMEOUT_S)),
            "allow_http": address.plain_http,
            "pool_max_idle_per_host": str(tier.connections),
        }
        config: Any = {"virtual_hosted_style_request": not address.path_style}
        endpoint = address.endpoint if address.path_style else address.virtual_endpoint
        config |= {name: value for name, value in (("endpoint", endpoint), ("region", address.region)) if value}
        backoff = {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=2), "base": 2}
        retries: Any = {"max_retries": ATTEMPTS - 1, "retry_timeout": ATTEMPTS * timeout, "backoff": backoff}
        try:
            if address.ca_bundle:
                client["root_certificate"] = Path(address.ca_bundle).read_bytes()
            options: Any = {"client_options": client, "retry_config": retries, "credential_provider": provider}
            store = S3Store(address.bucket, config=config, **options)
            if address.plain_http:
                return store, provider, None
            return store, provider, S3Store(address.bucket, config=config | {"unsigned_payload": True}, **options)
        except (BaseError, OSError, ValueError) as error:
            text = f"{self.where}: obstore takes no such address, certificates or options ({type(error).__name__})"
            raise StoreError(text, cause="io") from error


class _Provider(Boto3CredentialProvider):
    """boto3's credential chain, and the keys that it had at first. Raises ValueError without keys, or any error."""

    def __init__(self, *, ttl: timedelta) -> None:
        super().__init__(ttl=ttl)
        self.keys = self.credentials.get_frozen_credentials()
