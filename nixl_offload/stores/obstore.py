"""A bucket over obstore (Rust's object_store): the fastest client for probes and listings. The only file that knows it.

Threading: as ``base.Store``; the I/O runs on obstore's own runtime, which does not survive a fork: make the store in
the process that uses it. Ownership: a call holds the caller's memory no longer than it lasts.

What obstore raises quotes the server's whole answer, which may hold what was signed. So errors are read and rebuilt:
neither the text nor the cause of a StoreError from here contains an answer's body.
"""

from __future__ import annotations

import logging
import re
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import obstore
from obstore.exceptions import BaseError
from obstore.store import S3Store

from nixl_offload.config.schema import S3Config
from nixl_offload.errors import StoreError
from nixl_offload.stores.base import ObjectInfo
from nixl_offload.stores.http_get import DirectGets
from nixl_offload.stores.s3 import (
    ATTEMPTS,
    CONNECT_TIMEOUT_S,
    CREDENTIALS_RETRY_S,
    LIST_PAGE,
    NO_CREDENTIALS,
    BrokenBodyError,
    BucketStore,
    answer_error,
    closed_error,
    hush_botocore,
    no_bucket,
    printable,
    readable_ca_bundle,
    short_error,
    stuck_error,
)

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_STATUS: Final = re.compile(r"^ *status: (\d{3}),$", re.MULTILINE)
_KIND: Final = re.compile(r"^ *kind: (Connect|Timeout|Interrupted|Request|Decode|Unknown),$", re.MULTILINE)
_CODE: Final = re.compile(r"<Code>([A-Za-z0-9]{1,64})</Code>")
_MESSAGE: Final = re.compile(r"<Message>([^<>]{1,200})</Message>")
_OS_MESSAGE: Final = re.compile(r'^ *message: "([^"]{1,200})",$', re.MULTILINE)
_CREDENTIALS_URL: Final = re.compile(r"Error performing [A-Z]+ https?://(169\.254\.|\[fd00:ec2|sts\.)")
"""obstore's own chain was asking the machine, the container or STS for credentials."""
_SIGNED_FOR: Final = timedelta(minutes=15)
"""As far as clocks may be apart, and no longer: the address lets anybody read the object meanwhile."""
_SIGNED_IN_VAIN: Final = frozenset({400, 401, 403})
_LEFT_ALONE_MOST: Final = 3
"""After so many answers in a row that we cannot use, and obstore could, addresses are signed no more."""
_NOT_PARTIAL: Final = "source: NotPartial"
_CREDENTIALS_TTL: Final = timedelta(minutes=8)
"""botocore renews temporary credentials ten minutes before they end, so what it gives is good for longer than this."""


class ObstoreStore(BucketStore[S3Store]):
    """An S3 bucket behind one ``obstore.store.S3Store``.

    Credentials come from boto3's chain where boto3 is installed (environment, profile, role, IMDS), else from obstore's
    (environment, web identity, container, IMDS: no profiles). Where there are none, calls fail as ``denied``, and the
    chain is asked again every few seconds.
    """

    name = "obstore"

    def __init__(self, tier: S3Config) -> None:
        """Reach nothing yet."""
        super().__init__(tier)
        self._ignores_ranges = False
        self._left_alone = 0
        self._direct = DirectGets(timeout_s=tier.request_timeout_s, tls=partial(_tls, tier))

    def head(self, name: str) -> ObjectInfo | None:
        found = self._call(f"HEAD {name}", _head, self._address.key(name))
        if found is None:
            self._require_bucket()
            return None
        self._bucket_seen = True
        return self._info(found)

    def write(self, name: str, memory: memoryview) -> None:
        key = self._address.key(name)
        self._call(f"PUT {name}", obstore.put, key, memory.cast("B"), use_multipart=False)
        self._bucket_seen = True

    def _get(self, name: str, offset: int, memory: memoryview) -> None:
        self._call(f"GET {name}", self._read_into, name, offset, memory)

    def _copy(self, name: str) -> None:
        key = self._address.key(name)
        # overwrite=False sends the header that ``_make_store`` names, and nothing that forbids to overwrite.
        self._call(f"COPY {name}", obstore.copy, key, key, overwrite=False)

    def _delete(self, names: Sequence[str], doing: str) -> None:
        self._call(doing, obstore.delete, [self._address.key(name) for name in names])

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        # obstore lists whole path segments: take the directory, begin at the prefix, stop behind it.
        directory = prefix[: prefix.rfind("/") + 1]
        after = start_after
        if prefix != directory and prefix > start_after:
            exact = self.head(prefix)
            if exact is not None:
                yield exact
            after = prefix
        for page in self._pages(f"LIST {prefix}".rstrip(), directory, after):
            for found in page:
                info = self._info(found)
                if info.name <= start_after:
                    continue  # obstore drops a slash at the end of where it should begin.
                if info.name.startswith(prefix):
                    yield info
                elif info.name > prefix:
                    return

    def close(self) -> None:
        super().close()
        self._direct.close()

    def _read_into(self, store: S3Store, name: str, offset: int, memory: memoryview) -> None:
        key = self._address.key(name)
        if self._direct.refusing:
            self._read_by_obstore(store, name, key, offset, memory)
            return
        status = self._direct.read_into(obstore.sign(store, "GET", key, _SIGNED_FOR), offset, memory)
        if status is None:
            self._left_alone = 0
            return
        if self._closed:
            raise closed_error(self.where)
        self._read_by_obstore(store, name, key, offset, memory)
        self._left_alone += 0 < status < 500
        if status in _SIGNED_IN_VAIN or self._left_alone >= _LEFT_ALONE_MOST:
            logger.info("%s: answers presigned addresses by HTTP %d, of no use; obstore reads", self.where, status)
            self._direct.refuse()

    def _read_by_obstore(self, store: S3Store, name: str, key: str, offset: int, memory: memoryview) -> None:
        end = offset + memory.nbytes
        if not self._ignores_ranges:
            try:
                result = obstore.get(store, key, options={"range": (offset, end)})
            except BaseError as error:
                if _NOT_PARTIAL not in str(error):
                    raise
                # rclone sends the range, but as 200, and obstore refuses that. Whole objects, from now on.
                self._ignores_ranges = True
            else:
                got_bytes = result.range[1] - result.range[0]
                if got_bytes < memory.nbytes:
                    raise short_error(self.where, name, offset, memory.nbytes, got_bytes)
                self._fill(name, memory, result, 0)
                return
        result = obstore.get(store, key)
        size_bytes = int(result.meta["size"])
        if size_bytes < end:
            raise short_error(self.where, name, offset, memory.nbytes, max(0, size_bytes - offset))
        self._fill(name, memory, result, offset)

    def _fill(self, name: str, memory: memoryview, result: Any, skip_bytes: int) -> None:
        """Copy the body into ``memory``, less its first ``skip_bytes``; what comes behind stays unread."""
        filled = 0
        for chunk in result.stream(min_chunk_size=1 << 20):
            if filled == memory.nbytes:
                return
            view = memoryview(chunk)[skip_bytes:]
            skip_bytes = max(0, skip_bytes - len(chunk))
            view = view[: memory.nbytes - filled]
            memory[filled : filled + view.nbytes] = view
            filled += view.nbytes
        # Read to its end, where it ends, as a connection is used again only then.
        if filled < memory.nbytes:
            raise BrokenBodyError(f"{self.where}: GET {name}: the body ended early", cause="unreachable")

    def _pages(self, doing: str, directory: str, after: str) -> Iterator[Sequence[Any]]:
        """Yield pages of what is in ``directory`` behind ``after``, each a request of its own."""
        offset = self._address.key(after) if after else None
        where = self._address.key(directory).rstrip("/") or None
        listed: S3Store | None = None
        stream: Any = None
        last: Any = None

        def next_page(store: S3Store) -> Any:
            nonlocal listed, stream
            if store is not listed:  # at first, and where the client was renewed
                stream = obstore.list(store, where, offset=last or offset, chunk_size=LIST_PAGE)
                listed = store
            return next(stream, None)

        while (page := self._call(doing, next_page)) is not None:
            self._bucket_seen = True
            if page and page[-1]["path"] == last:
                raise stuck_error(self.where, doing)
            last = page[-1]["path"] if page else last
            yield page

    def _list_nothing(self, name: str) -> None:
        self._call("LIST", lambda store: next(obstore.list(store, self._address.key(name)), None))

    def _info(self, found: Any) -> ObjectInfo:
        return ObjectInfo(self._address.name(found["path"]), int(found["size"]), found["last_modified"].timestamp())

    def _call(self, doing: str, function: Callable[..., _T], *arguments: Any, **options: Any) -> _T:
        """Call ``function`` with the S3Store first. Raises StoreError alone."""
        store = self._client()
        try:
            return function(store, *arguments, **options)
        except StoreError:
            raise
        except (BaseError, OSError, ValueError) as error:
            foreign = error
        # Out of the handler, so that the original, which quotes the answer, is not chained as the context.
        failure = self._translated(doing, foreign)
        if failure.cause == "denied" and self._renewed(store):
            return self._call(doing, function, *arguments, **options)
        raise failure

    def _translated(self, doing: str, foreign: Exception) -> StoreError:
        """Return the StoreError, with a cause that is as the original less what it quotes."""
        error = self._read(doing, str(foreign))
        if error.cause == "io" and "NoSuchBucket" in str(foreign):
            self._bucket_seen = False
        first_line = str(error).partition(": ")[2]
        foreign_type = type(foreign) if isinstance(foreign, BaseError) else OSError
        error.__cause__ = foreign_type(first_line)
        return error

    def _read(self, doing: str, text: str) -> StoreError:
        begin = f"{self.where}: {doing}: "
        if _CREDENTIALS_URL.search(text):
            return StoreError(begin + NO_CREDENTIALS, cause="denied")
        status = _STATUS.search(text)
        code, message = _CODE.search(text), _MESSAGE.search(text)
        if code is not None and code[1] == "NoSuchBucket":
            return no_bucket(doing, self._address)
        if status is not None:
            said = (code[1] if code else "", message[1] if message else "")
            return answer_error(doing, self._address, int(status[1]), *said)
        kind = _KIND.search(text)
        system = _OS_MESSAGE.search(text)
        why = f" ({system[1]})" if system else ""
        if kind is not None and kind[1] == "Timeout":
            return StoreError(
                f"{begin}no answer within {self._tier.request_timeout_s:g} s, {ATTEMPTS} times", cause="timeout"
            )
        if kind is not None and kind[1] == "Connect":
            hint = "; set ca_bundle if the server has its own certificate authority" if "ertificate" in text else ""
            return StoreError(f"{begin}cannot connect{why}{hint}", cause="unreachable")
        if kind is not None:
            broken = StoreError if "RetryError" in text else BrokenBodyError
            return broken(f"{begin}the connection broke{why}", cause="unreachable")
        if "redirect" in text:
            return StoreError(f"{begin}redirected; the bucket may be in another region: set region", cause="io")
        if "redential" in text or "Metadata" in text:
            return StoreError(f"{begin}{NO_CREDENTIALS}", cause="denied")
        words = "refused" if "<" in text else printable(text.partition("\n")[0][:200])
        return StoreError(f"{begin}{words}", cause="io")

    def _make(self) -> tuple[S3Store, Any]:
        provider = self._credentials()
        try:
            return self._make_store(provider), provider and provider.credentials
        except (BaseError, OSError, ValueError) as error:
            text = f"{self.where}: obstore takes no such address, certificates or options ({type(error).__name__})"
            raise StoreError(text, cause="io") from error

    def _make_store(self, provider: Any) -> S3Store:
        tier, address = self._tier, self._address
        timeout = timedelta(seconds=tier.request_timeout_s)
        client: Any = {
            "timeout": timeout,
            "connect_timeout": min(timeout, timedelta(seconds=CONNECT_TIMEOUT_S)),
            "allow_http": address.plain_http,
            "pool_max_idle_per_host": str(tier.connections),
        }
        bundle = readable_ca_bundle(tier)
        if bundle is not None:
            client["root_certificate"] = Path(bundle).read_bytes()
        config: Any = {
            "virtual_hosted_style_request": not address.path_style,
            # obstore knows no metadata directive, but this way to send a header along with some of its copies.
            "copy_if_not_exists": "header: x-amz-metadata-directive: REPLACE",
        }
        endpoint = address.endpoint if address.path_style else address.virtual_endpoint
        if endpoint is not None:
            config["endpoint"] = endpoint
        if address.region is not None:
            config["region"] = address.region
        retries: Any = {
            "max_retries": ATTEMPTS - 1,
            "retry_timeout": ATTEMPTS * timeout,
            "backoff": {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=2), "base": 2},
        }
        return S3Store(
            address.bucket,
            config=config,
            client_options=client,
            retry_config=retries,
            credential_provider=provider,
        )

    def _credentials(self) -> Any:
        """Return boto3's chain as a provider; None where boto3 is not installed, for obstore's own chain."""
        try:
            from obstore.auth.boto3 import Boto3CredentialProvider
        except ImportError:
            return None
        hush_botocore()
        why = ""
        if time.monotonic() >= self._ask_again_s:
            try:
                return Boto3CredentialProvider(ttl=_CREDENTIALS_TTL)
            except Exception as error:  # noqa: BLE001  whatever the chain raises: no secret of it may get out
                self._ask_again_s = time.monotonic() + CREDENTIALS_RETRY_S
                why = "" if isinstance(error, ValueError) else f" ({type(error).__name__})"
        raise StoreError(f"{self.where}: {NO_CREDENTIALS}{why}", cause="denied")


def _tls(tier: S3Config) -> ssl.SSLContext:
    context, bundle = ssl.create_default_context(), readable_ca_bundle(tier)
    if bundle is not None:
        context.load_verify_locations(bundle)
    return context


def _head(store: S3Store, key: str) -> Any:
    """Return None for an absent object: the answer that most probes get is not worth an error of ours."""
    try:
        return obstore.head(store, key)
    except FileNotFoundError:
        return None
