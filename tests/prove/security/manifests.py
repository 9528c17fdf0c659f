"""Forged manifests, whatever else can lie in a manifest's place, and shards that promise much: commands survive, and
believe none of it.
"""

from __future__ import annotations

import io
import json
import os
import random
import resource
import traceback
from collections.abc import Callable
from contextlib import closing, redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import yaml

from nixl_offload.chunk.header import slot_bytes
from nixl_offload.cli.main import main
from nixl_offload.identity.namespace import make_namespace
from nixl_offload.stores.directory import TreeStore
from tests.prove.cells import Outcome
from tests.prove.security.attacks import promising
from tests.prove.security.memory import MOST_BYTES, PROMISED_BYTES, peak_bytes
from tests.unit import shard_images

MOST_KIB: Final = 200 << 10
"""That a command may take for a forged manifest."""


def _without_authenticate(said: dict[str, Any], drawn: random.Random) -> object:
    del said["fields"]["settings"]["authenticate"]
    return said


def _other_numbers(said: dict[str, Any], drawn: random.Random) -> object:
    name = drawn.choice(["world_size", "blocks_per_chunk", "tokens_per_block", "tp"])
    said["fields"][name] = drawn.choice([10**9, -1, 2**63, 10**400, 1e308, "1", None, True, [], {}])
    return said


def _other_sizes(said: dict[str, Any], drawn: random.Random) -> object:
    said["fields"]["groups"] = drawn.choice(
        [[], {}, "x", [{"group_id": 0, "slot_bytes": [2**62] * 1000}], [None] * 10**5]
    )
    return said


def _other_name(said: dict[str, Any], drawn: random.Random) -> object:
    said["namespace"] = drawn.choice(["../../etc", "\x1b[2J", "00" * 32, 7, None])
    return said


def _other_shape(said: dict[str, Any], drawn: random.Random) -> object:
    return drawn.choice([[], "x", 7, None, {}, {"fields": []}, {"fields": {"settings": []}}])


FORGED: Final = (_without_authenticate, _other_numbers, _other_sizes, _other_name, _other_shape)


def _garbage(path: Path, drawn: random.Random) -> None:
    path.write_bytes(drawn.choice([b"", b"\xff\xfe", b"{", b"[" * 200_000, b'{"fields":' * 50_000, b"9" * 100_000]))


def _huge(path: Path, drawn: random.Random) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)  # no space is taken


def _link(path: Path, drawn: random.Random) -> None:
    path.symlink_to(drawn.choice(["/etc/passwd", "/dev/zero", "manifest.json", "/proc/self/environ"]))


def _fifo(path: Path, drawn: random.Random) -> None:
    os.mkfifo(path)


def _directory(path: Path, drawn: random.Random) -> None:
    path.mkdir()


PLANTED: Final[tuple[Callable[[Path, random.Random], None], ...]] = (_garbage, _huge, _link, _fifo, _directory)


def try_manifests(seed: int, rounds: int) -> Outcome:
    """Plant something in place of the manifest of an authenticated namespace with chunks that have no MAC."""
    outcome = Outcome(counts={"manifests": 0})
    fields = shard_images.namespace().fields
    namespace = make_namespace(replace(fields, settings={**fields.settings, "authenticate": "blake3 1"}))
    root = Path("shared").absolute()
    store = TreeStore(str(root))
    shard_images.put_chunk(store, namespace, 1)
    path = root / namespace.name / "manifest.json"
    Path("keys").touch(0o600)
    Path("keys").write_text(random.Random(seed).randbytes(32).hex())
    tier = {"kind": "shared_dir", "path": str(root), "capacity": "64MiB"}
    said = {"authenticate": {"key_file": str(Path("keys").absolute())}, "tiers": [tier]}
    Path("kv.yaml").write_text(yaml.safe_dump(said))
    for number in range(rounds):
        drawn = random.Random(f"{seed} {number}")
        for forge in FORGED:
            genuine = json.loads(json.dumps(namespace.manifest()))
            try:
                text = json.dumps(forge(genuine, drawn))
            except (OverflowError, ValueError):
                continue
            path.write_text(text)
            _commands(f"seed {seed}, round {number}, {forge.__name__}", outcome)
            path.unlink()
        plant = PLANTED[number % len(PLANTED)]
        plant(path, drawn)
        _commands(f"seed {seed}, round {number}, {plant.__name__}", outcome)
        (path.rmdir if plant is _directory else path.unlink)()
    path.write_text(json.dumps(namespace.manifest()))
    if _verified("the genuine one", outcome) != {"bad": 1}:
        outcome.missed.append("with the genuine manifest a chunk without a MAC is not bad")
    # A server that wants no MAC takes the same chunk: so it is the MAC that is missed, and nothing else.
    plain, root = shard_images.namespace(), Path("plain").absolute()
    path = root / plain.name / "manifest.json"
    with closing(TreeStore(str(root))) as unsigned:
        shard_images.put_chunk(unsigned, plain, 1)
        path.write_text(json.dumps(plain.manifest()))
    Path("kv.yaml").write_text(yaml.safe_dump({"tiers": [{**tier, "path": str(root)}]}))
    if _verified("without authenticate", outcome) != {"good": 1}:
        outcome.missed.append("without authenticate the chunk is not good")
    with closing(TreeStore(str(root))) as unsigned:
        _try_large_shard(path, root / shard_images.put_chunk(unsigned, plain, 3)[0], outcome)
    store.close()
    return outcome


def _try_large_shard(manifest: Path, shard: Path, outcome: Outcome) -> None:
    """Have ``verify`` meet a shard of which header and length say that it is large: first by a manifest that says
    otherwise, then without one, so that all of it is read.
    """
    shard.write_bytes(promising(shard.read_bytes()))
    os.truncate(shard, slot_bytes(shard_images.BLOCKS, PROMISED_BYTES // shard_images.BLOCKS))
    for words in ("a large shard", "a large shard without a manifest"):
        before_bytes = peak_bytes()
        if (verified := _verified(words, outcome)) != {"good": 1, "bad": 1}:
            outcome.wrong.append(f"{words}: {verified}")
        if (grown_bytes := peak_bytes() - before_bytes) > MOST_BYTES:
            outcome.wrong.append(f"{words}: verify asked for {grown_bytes >> 20} MiB")
        manifest.unlink(missing_ok=True)


def _commands(words: str, outcome: Outcome) -> None:
    outcome.counts["manifests"] += 1
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    _run(["ls", "kv.yaml"], words, outcome)
    verified = _verified(words, outcome)
    _run(["gc", "kv.yaml"], words, outcome)
    if "good" in verified:
        outcome.wrong.append(f"{words}: verify calls a chunk good that has no MAC")
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    if grown > MOST_KIB:
        outcome.wrong.append(f"{words}: commands took {grown >> 10} MiB more")


def _verified(words: str, outcome: Outcome) -> dict[str, int]:
    """Return how many chunks ``verify`` calls what, without those of which there is none."""
    told = _run(["verify", "kv.yaml", "--json"], words, outcome)
    chunks: dict[str, int] = json.loads(told.splitlines()[-1])["tiers"][0].get("chunks", {}) if told else {}
    return {verdict: count for verdict, count in chunks.items() if count}


def _run(arguments: list[str], words: str, outcome: Outcome) -> str:
    out, error = io.StringIO(), io.StringIO()
    try:
        with redirect_stdout(out), redirect_stderr(error):
            code = main(arguments)
    except BaseException:  # noqa: BLE001 - whatever it is, it is a finding
        outcome.dead.append(f"{words}: {arguments[0]}: {traceback.format_exc(limit=-2)}")
        return ""
    if code not in (0, 1) or "Traceback" in error.getvalue():
        outcome.dead.append(f"{words}: {arguments[0]} ended with {code}: {error.getvalue()[-300:]}")
    return out.getvalue()
