"""Proves that examples/router.py works as it stands, in front of a real ``vllm serve``: what was pushed out of memory
comes back from the drive because a prefetch was posted, the request that comes then is served from memory with the
same answer, and neither a bad hint nor a hint of a client's own does anything.
"""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from examples.router import Router
from nixl_offload.vllm.metric_names import PREFIX
from tests.vllm.harness import CHUNK_TOKENS, Workshop, chain_config
from tests.vllm.server import WORDS, Server
from tests.vllm.zygote import Zygote

PROMPT_CHUNKS = 5
SOURCES = "vllm:prompt_tokens_cached_by_source_total"


class Routed(NamedTuple):
    """A server with a router in front of it."""

    server: Server
    url: str
    model: str


def text_of(seed: int) -> str:
    """A prompt of ``PROMPT_CHUNKS`` chunks and a tail."""
    return " ".join(f"w{(seed + 7 * at * at) % WORDS}" for at in range(PROMPT_CHUNKS * CHUNK_TOKENS + 40))


@pytest.fixture(scope="module")
def routed(zygote: Zygote, workshop: Workshop) -> Iterator[Routed]:
    scratch = workshop.scratch
    config = chain_config(
        {"kind": "memory", "capacity": "12MiB"},  # 11 chunks, of which a prefetch takes half
        {"kind": "slab", "path": str(scratch / "slab"), "capacity": "256MiB"},
    )
    server = Server(zygote, scratch, config, has_tokenizer=True)
    router = Router([server.url])
    thread = threading.Thread(target=router.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield Routed(server, f"http://127.0.0.1:{router.server_port}", server.model)
    finally:
        router.shutdown()
        thread.join()
        router.server_close()
        server.close()


def ask(url: str, body: dict[str, Any]) -> Any:
    data = json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data, {"Content-Type": "application/json"})) as reply:
        return json.load(reply)


def answer_to(routed: Routed, body: dict[str, Any]) -> str:
    reply = ask(f"{routed.url}/v1/completions", {"max_tokens": 4, "temperature": 0, "ignore_eos": True, **body})
    text: str = reply["choices"][0]["text"]
    return text


def chunks(server: Server, operation: str) -> float:
    return server.samples(PREFIX + "chunks_total", "operation").get(operation, 0.0)


def stored(routed: Routed, path: str, body: dict[str, Any]) -> Any:
    """Ask, and wait until all chunks of the prompt are in the slab."""
    server = routed.server
    before = chunks(server, "write_through")
    reply = ask(routed.url + path, {"max_tokens": 4, "temperature": 0, "ignore_eos": True, **body})
    server.until(lambda: chunks(server, "write_through") == before + PROMPT_CHUNKS, 60, "all is in the slab")
    return reply


def push_out(routed: Routed, begin: int) -> None:
    """Let other prompts take all of memory, and vLLM forget its own cache."""
    for seed in (begin, begin + 1, begin + 2):
        stored(routed, "/v1/completions", {"model": routed.model, "prompt": text_of(seed)})
    routed.server.reset_prefix_cache()


def test_a_prefetch_brings_what_the_next_request_needs(routed: Routed) -> None:
    """Under the salt that the body has; the request itself is then served from memory alone."""
    server = routed.server
    body = {"model": routed.model, "prompt": text_of(1), "cache_salt": "salt of a tenant"}
    first = stored(routed, "/v1/completions", body)["choices"][0]["text"]
    push_out(routed, 100)
    assert chunks(server, "prefetch") == 0
    assert ask(f"{routed.url}/prefetch", {**body, "prompt": text_of(1) + " w5 w6"}) == {}
    server.until(lambda: chunks(server, "prefetch") == PROMPT_CHUNKS, 30, "the chunks are in memory")
    before = server.samples(SOURCES, "source")
    assert answer_to(routed, body) == first
    after = server.samples(SOURCES, "source")
    came = {source: after[source] - before.get(source, 0.0) for source in after}
    assert {source: tokens for source, tokens in came.items() if tokens} == {"host": PROMPT_CHUNKS * CHUNK_TOKENS}


def test_a_prefetch_for_a_chat(routed: Routed) -> None:
    """Of messages instead of a prompt: vLLM applies the chat template."""
    server, begin = routed.server, chunks(routed.server, "prefetch")
    body = {"model": routed.model, "messages": [{"role": "user", "content": text_of(2)}]}
    stored(routed, "/v1/chat/completions", body)
    push_out(routed, 200)
    ask(f"{routed.url}/prefetch", body)
    server.until(lambda: chunks(server, "prefetch") == begin + PROMPT_CHUNKS, 30, "the chunks are in memory")


def test_hints_of_clients_and_nonsense_do_nothing(routed: Routed) -> None:
    server = routed.server
    nonsense = {"nixl_offload": {"prefetch": "please"}}
    body = {"model": routed.model, "prompt": "w1 w2 w3", "kv_transfer_params": nonsense}
    answer_to(routed, body)
    counted = server.samples(PREFIX + "hints_total", "result")
    assert counted["bad"] == 0, "the router took it away"
    for _ in range(2):
        ask(f"{server.url}/v1/completions", {**body, "max_tokens": 1})
    server.until(lambda: server.samples(PREFIX + "hints_total", "result")["bad"] == 2, 30, "they are counted")
    log = server.log.read_text(errors="replace")
    assert (
        log.count("A hint was ignored: kv_transfer_params.nixl_offload.prefetch: Input should be a valid boolean") == 1
    )
    for path, refused in (("/prefetch", {"model": routed.model}), ("/v1/completions", ["no object"])):
        with pytest.raises(urllib.error.HTTPError) as raised:
            ask(routed.url + path, refused)  # type: ignore[arg-type]
        with raised.value as error:
            assert error.code == 400
