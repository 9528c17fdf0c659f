"""Proves that no secret gets out. Credentials that nothing else could be confused with are given to engines that log
all that they and their libraries have to say, through success and failure; then all that was written is searched.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterator
from typing import Any

import pytest

from examples.demo.engine import EngineError
from tests.s3.proxy import Answer as Reply, Cut, FaultProxy, Reset
from tests.s3.servers import RcloneServer
from tests.vllm.damage import ENGINE_OPTIONS, FULL_TOKENS, chunk_prompts, hits, let_beliefs_lapse, side_by_side
from tests.vllm.harness import Workshop, forked_workshop
from tests.vllm.media import LOOKING, MOVERS, bucket

SECRET_KEY = "sEcReTkEyThatNobodyMaySee0123456789abcdef"
SESSION_TOKEN = "sEsSiOnToKenThatNobodyMaySee0123456789abcdef"
"""Rclone does not look at it, but it is sent, signed and checked as a part of each request."""
MAC_KEY = "5ec2e70b0dd1ee5ee0123456789abcdef0123456789abcdef0123456789abcde"
"""Of ``authenticate``."""
PROMPTS = chunk_prompts(1, seed=221)
FRESH = iter(chunk_prompts(40, seed=222))

LOG_ALL: dict[str, Any] = {
    "version": 1,
    "disable_existing_loggers": False,
    "handlers": {"stderr": {"class": "logging.StreamHandler", "level": "DEBUG", "stream": "ext://sys.stderr"}},
    "root": {"handlers": ["stderr"], "level": "DEBUG"},
    "loggers": {"vllm": {"handlers": ["stderr"], "level": "DEBUG", "propagate": False}},
}
"""Every logger of every library, as an operator sets it up who wants to know why nothing works."""
SAID = {"obj": "nixl_plugin_manager.cpp", "obstore": "store of 1 chunks: "}
"""What at least is to be found in the log: of each library, and of ours, what it says at DEBUG only."""


@pytest.fixture(scope="module")
def server() -> Iterator[RcloneServer]:
    """A server with a secret that is easily recognised."""
    made = RcloneServer()
    made.secret_access_key = SECRET_KEY
    with made as started:
        yield started


@dataclasses.dataclass(frozen=True)
class Talkative:
    """Where engines log all there is."""

    workshop: Workshop
    environment: dict[str, str]


@pytest.fixture(scope="module")
def talkative(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Talkative]:
    """With a zygote of their own: libraries read how much to log when they are loaded."""
    scratch = tmp_path_factory.mktemp("talkative")
    (scratch / "logging.json").write_text(json.dumps(LOG_ALL))
    talk = {
        "VLLM_LOGGING_LEVEL": "DEBUG",
        "VLLM_LOGGING_CONFIG_PATH": str(scratch / "logging.json"),
        "NIXL_LOG_LEVEL": "DEBUG",
        "RUST_LOG": "debug",
    }
    with forked_workshop(scratch, **talk) as made:
        yield Talkative(made, talk)


def _is_silent(text: str) -> None:
    for secret in (SECRET_KEY, SESSION_TOKEN, MAC_KEY, repr(bytes.fromhex(MAC_KEY))[2:20]):
        at = text.find(secret)
        assert at < 0, f"a secret was told: ...{text[max(0, at - 300) : at + len(secret)]}"


def test_engines_tell_no_secret(talkative: Talkative, server: RcloneServer) -> None:
    """Stores, loads, every kind of failure, credentials that are refused; the log has it all but the secrets."""
    side_by_side(*(functools.partial(_engine_tells_no_secret, mover, talkative, server) for mover in MOVERS))


def _engine_tells_no_secret(mover: str, talkative: Talkative, server: RcloneServer) -> None:
    environment = {**server.environment, "AWS_SESSION_TOKEN": SESSION_TOKEN, **talkative.environment}
    with FaultProxy(server.port) as proxy:
        medium = bucket(server, mover, prefix=f"secret/{mover}", endpoint=proxy.endpoint, request_timeout="1s")
        keys = talkative.workshop.scratch / f"keys-{mover}"
        keys.touch(0o600)
        keys.write_text(MAC_KEY)
        config = medium.config(lookup=LOOKING, load_timeout="2s", authenticate={"key_file": str(keys)})
        engine = talkative.workshop.start_engine(connector=config, environment=environment, **ENGINE_OPTIONS)
        expected = engine.generate(PROMPTS)
        assert engine.settle()
        assert engine.reset_prefix_cache()
        assert hits(engine.generate(PROMPTS)) == FULL_TOKENS
        for operation in ("HEAD", "GET", "PUT"):
            for fault in (Reply(403, "SignatureDoesNotMatch"), Reset("answer"), Cut(0.5)):
                let_beliefs_lapse()
                with proxy.inject(fault, operation=operation):
                    assert engine.reset_prefix_cache()
                    answers = engine.generate([*PROMPTS, next(FRESH)])
                    assert answers[0].tokens == expected[0].tokens
        assert engine.settle()
        _is_silent(json.dumps(engine.metrics()))
        engine.stop()
        log = engine.log.read_text(errors="replace")
        assert SAID[mover] in log, "it was not asked to say everything"
        _is_silent(log)

        # The server refuses the signature, and may quote what was signed.
        wrong = {**environment, "AWS_ACCESS_KEY_ID": "AKIAUNKNOWN000000000"}
        try:
            engine = talkative.workshop.start_engine(connector=config, environment=wrong, **ENGINE_OPTIONS)
            engine.generate(PROMPTS)
            engine.stop()
        except EngineError as error:
            _is_silent(str(error))
    for path in talkative.workshop.scratch.glob("*.log"):
        _is_silent(path.read_text(errors="replace"))
