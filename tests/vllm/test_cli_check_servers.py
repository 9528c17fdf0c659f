"""``nixl-offload check --vllm-args`` with a real vLLM: its own parser and its own final configurations, compared.

Most tests ask one child, as the command does, so that vLLM is imported once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from examples.demo.engine import quick_environment
from examples.demo.model import TINY, write_model
from nixl_offload.cli.check import servers as check_servers
from nixl_offload.cli.check.child import Answer, ChildProcess
from nixl_offload.cli.check.report import Section
from nixl_offload.cli.check.servers import LIMIT_S, add_comparison, add_server, read_command_lines
from nixl_offload.cli.main import main
from nixl_offload.config import kv_transfer_config, parse_config
from nixl_offload.identity.compare import Comparison, Server, compare, differing
from nixl_offload.identity.namespace import NamespaceFields
from tests.vllm.families import write_mla
from tests.vllm.harness import Workshop, prompts, tier_config, tree_tier

ROOT = Path(__file__).resolve().parents[2]
TIERS = {"tiers": [{"kind": "shared_dir", "path": "/kv", "capacity": "1GiB"}]}
TOLD_BY_RANKS = {
    *("attention_backend", "weights", "dtype", "kv_layout", "tokens_per_block", "blocks_per_chunk", "tokens_per_hash"),
    *("groups", "ranks", "format_version"),
}
"""Fields of a namespace that rest on what ranks allocate or read, or that no argument changes."""

SETTLED_WITH_RANKS = {
    "cache_config.cache_hit_alignment_tokens",
    "cache_config.effective_attention_block_size",
    "cache_config.hash_block_size",
    "cache_config.kv_cache_layout",
}
"""What vLLM fills into its configuration when ranks have said what they hold."""


class Asked:
    """Asks vLLM what command lines come to."""

    def __init__(self, model: Path, environment: dict[str, str], **fields: Any) -> None:
        """``fields``: further top-level fields of our config."""
        self.model = model
        self.environment = environment
        config = parse_config({**TIERS, **fields})
        self._transfer = kv_transfer_config(config, config.to_dict())
        self.child = ChildProcess(environment)

    def answer(self, arguments: str, other: str | None = None, models: Sequence[Path] = ()) -> Answer:
        """What the child says of ``MODEL arguments``, beside ``MODEL other``."""
        texts = [text for text in (arguments, other) if text is not None]
        named = [f"{model} {text}" for model, text in zip(models or [self.model] * 2, texts, strict=False)]
        words, *more = [line.words for line in read_command_lines(named)]
        theirs = more[0] if more else None
        return self.child.run("server", limit_s=LIMIT_S, words=words, other=theirs, transfer=self._transfer)

    def server(self, arguments: str, other: str | None = None, models: Sequence[Path] = ()) -> Server:
        answer = self.answer(arguments, other, models)
        assert "server" in answer, answer
        return Server.from_dict(answer["server"])

    def compare(self, first: str, second: str, model: Path | None = None) -> Comparison:
        """``model``: of the second, where it is another one."""
        models = [self.model, model or self.model]
        return compare(self.server(first, second, models), self.server(second, first, models[::-1]), {}, {})


@pytest.fixture(scope="module")
def asked(workshop: Workshop) -> Iterator[Asked]:
    scratch = workshop.scratch  # vLLM's cache of model classes is there
    asked = Asked(write_model(scratch / "tiny", TINY), quick_environment(scratch=scratch))
    with asked.child:
        asked.server("")  # its process is the module's, not the first test's
        yield asked


@pytest.mark.parametrize(
    ("second", "because", "difference"),
    [
        ("--max-model-len 2048", "max_model_len", ("model_config.max_model_len", (4096, 2048))),
        ("--dtype float16", "dtype", ("model_config.dtype", ("torch.bfloat16", "torch.float16"))),
        ("--kv-cache-dtype fp8", "kv_cache_dtype", ("cache_config.cache_dtype", ("auto", "fp8"))),
        ("--block-size 64", "block_size", ("cache_config.block_size", (16, 64))),
        ("-tp 2", "tensor_parallel_size", ("tp", (1, 2))),
        ("--quantization fp8", "quantization", ("model_config.quantization", (None, "fp8"))),
        ("--hf-overrides.rope_theta 500", "hf_overrides", ("model_config.hf_config.rope_theta", ("(not there)", 500))),
        ("--enable-lora", "enable_lora", ("lora_config", (None, "(not there)"))),
        (
            "--prefix-caching-hash-algo sha256_cbor",
            "prefix_caching_hash_algo",
            ("hash_algorithm", ("sha256", "sha256_cbor")),
        ),
    ],
)
def test_what_counts_keeps_servers_apart(asked: Asked, second: str, because: str, difference: tuple[str, Any]) -> None:
    """It is named as the user wrote it, with setting and values; arguments that count for nothing are no part of it."""
    found = asked.compare("--seed 3", f"{second} --max-num-seqs 7")
    assert not found.share
    assert found.because == (because,)
    assert difference in found.differences
    assert [each.name for each in found.harmless] == ["seed", "max_num_seqs"]


def test_tensor_parallelism_does_not_count_where_chunks_are_cut(asked: Asked) -> None:
    """With ``shards`` servers of two sizes share, if they cut alike."""
    cut = Asked(asked.model, asked.environment, shards=2)
    cut.child = asked.child
    assert cut.compare("", "-tp 2").share
    assert not cut.compare("", "-tp 2 --dtype float16").share
    auto = Asked(asked.model, asked.environment, shards="auto")
    auto.child = asked.child
    differences = compare(cut.server(""), auto.server(""), {}, {}).differences
    assert ("shards", ("2", "auto")) in differences


def test_mla_is_shared_by_all_sizes_unless_the_config_says_otherwise(asked: Asked, workshop: Workshop) -> None:
    """By default, and with ``auto``, which cuts it alike."""
    model = write_mla(workshop.scratch / "mla-check")
    of = {}
    for said in ("distinct", "auto", "per_rank"):
        fields = {} if said == "distinct" else {"shards": said}
        mla = Asked(model, asked.environment, **fields)
        mla.child = asked.child
        of[said] = mla.server(""), mla.server("-tp 2")
    assert compare(*of["distinct"], {}, {}).differences == ()
    assert compare(of["distinct"][0], of["auto"][1], {}, {}).differences == ()
    assert compare(*of["per_rank"], {}, {}).differences != ()
    assert compare(asked.server(""), asked.server("-tp 2"), {}, {}).differences != ()


def test_pipeline_stages_do_not_count_where_layers_are_cut_for_them(asked: Asked) -> None:
    staged = Asked(asked.model, asked.environment, shards={"heads": 2, "layers": 2})
    staged.child = asked.child
    assert staged.compare("", "-pp 2").share
    own = Asked(asked.model, asked.environment, shards=2)
    own.child = asked.child
    assert own.compare("-pp 2", "-pp 2 -tp 2").share
    differences = compare(own.server(""), own.server("-pp 2"), {}, {}).differences
    assert [name for name, _ in differences] == ["shards.layers"]


def test_a_server_that_stores_rank_by_rank_shares_with_its_like_alone(asked: Asked) -> None:
    """Although it has the same ``shards``: its size cannot hold them."""
    cut = Asked(asked.model, asked.environment, shards={"heads": 1, "layers": 1})
    cut.child = asked.child
    for arguments, words in (("-tp 2", "tensor parallelism 2 cannot share out"), ("-pp 2", "`layers: 1` cuts at none")):
        found = cut.compare("", arguments)
        assert not found.share
        (told,) = [values for name, values in found.differences if name == "shards"]
        assert words in told[1]
        assert cut.compare(arguments, arguments).share


def test_what_does_not_count_is_named_with_its_reason(asked: Asked) -> None:
    second = "--max-num-seqs 512 --enforce-eager --port 9000 --api-key secret --hf-token secret --dtype bfloat16"
    found = asked.compare("--gpu-memory-utilization 0.5", second)
    assert found.share
    assert {each.name: each.reason for each in found.harmless} == {
        "max_num_seqs": "how requests are batched",
        "enforce_eager": "how the same operations are compiled or captured: rounding",
        "gpu_memory_utilization": "how many blocks there are, not what is in them",
        "port": "the API server's own",
        "api_key": "the API server's own",
        "hf_token": "a credential",
        "dtype": "what counts comes out the same",
    }
    assert "secret" not in str(found)
    section = Section("servers", "")
    add_comparison(section, found)
    (line, *harmless) = section.findings
    assert (line.state, line.words.split(", as far")[0]) == ("ok", "these two servers share what they store")
    assert "max_num_seqs: not set | 512 (how requests are batched)" in [each.words for each in harmless]


def test_one_configuration_leaves_nothing_for_the_next(asked: Asked) -> None:
    """A server described twice is the same, though vLLM sets variables that count, by what it is given."""
    layout = "environment.VLLM_SSM_CONV_STATE_LAYOUT"
    transfer = '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}'
    plain = asked.server("")
    assert asked.server(f"--kv-transfer-config '{transfer}'").values[layout] == "DS"
    asked.server("--max-model-len 512 --compilation-config.mode 0 --enable-lora -dp 2")
    assert asked.server("").values == plain.values
    assert plain.values.get(layout) != "DS"


def test_all_that_arguments_decide_is_compared(asked: Asked) -> None:
    """Every field of the namespace but those of the ranks; a field that is added one day fails here until it is said
    which it is.
    """
    names = {each.name for each in dataclasses.fields(NamespaceFields)}
    values = asked.server("").values
    assert names >= TOLD_BY_RANKS
    assert names - TOLD_BY_RANKS - {"settings"} <= set(values)
    assert "model_config.max_model_len" in values


def test_a_running_engine_stores_under_what_is_compared(asked: Asked, workshop: Workshop, tmp_path: Path) -> None:
    """What is compared equals what an engine of these arguments writes into the manifest of its namespace; only what
    is settled with the ranks is not known beforehand.
    """
    config = tier_config(tree_tier(tmp_path))
    with workshop.start_engine(connector=config, model=asked.model) as engine:
        engine.generate(prompts(1, steps=1, seed=4711))
        assert engine.settle()
        engine.stop()
    (manifest,) = tmp_path.glob("*/manifest.json")
    fields = json.loads(manifest.read_text())["fields"]
    extension = "--worker-extension-cls tests.vllm.poison.PoisonExtension"
    found = asked.server(f"--dtype float32 --block-size 64 --max-model-len 4096 {extension}")
    differences = differing(found.values, {**fields, **fields["settings"]})
    assert {each.path for each in differences} <= {*TOLD_BY_RANKS, *SETTLED_WITH_RANKS, "chunk_tokens", "settings"}


def test_the_servers_own_connector_config_counts(asked: Asked) -> None:
    """A list that names its own tenant and chunk size is compared by them."""
    config = parse_config({**TIERS, "tenant": "b", "chunk_tokens": 512})
    own = json.dumps(kv_transfer_config(config, config.to_dict()))
    found = asked.compare("", f"--kv-transfer-config '{own}'")
    assert found.differences == (("tenant", ("default", "b")), ("chunk_tokens", (256, 512)))
    assert found.because == ("kv_transfer_config",)


def test_a_server_that_would_stay_off_is_told(asked: Asked) -> None:
    assert asked.server("").off is None
    server, section = asked.server("--no-enable-prefix-caching"), Section("servers", "")
    add_server(section, server)
    found = {each.name: each for each in section.findings}
    assert found["model"].words == "tiny, by the content of its files, which the server reads at start"
    assert found["identity"].state == "ok"
    assert "prefix caching is off" in str(server.off)


def test_weights_of_local_models(asked: Asked, tmp_path: Path) -> None:
    """The same directory by another path is the same; a copy of that name is compared by the servers; another name is
    a difference.
    """
    (tmp_path / "link").symlink_to(asked.model.parent)
    (tmp_path / "copy/tiny").mkdir(parents=True)
    (tmp_path / "copy/tiny/config.json").write_text((asked.model / "config.json").read_text())
    (tmp_path / "tiny-ft").symlink_to(tmp_path / "copy/tiny")
    same = asked.compare("", "", tmp_path / "link/tiny")
    assert (same.share, same.weights, same.harmless) == (True, (), ())
    copy = asked.compare("", "", tmp_path / "copy/tiny")
    assert (copy.share, copy.weights) == (True, ((str(asked.model), str(tmp_path / "copy/tiny")),))
    assert asked.compare("", "", tmp_path / "tiny-ft").differences == (("model", ("tiny", "tiny-ft")),)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--max-modl-len 3", "unrecognized arguments: --max-modl-len; nearest: --max-model-len"),
        ("--api-kay SECRET --hf-tokem=SECRET", "unrecognized arguments: --api-kay --hf-tokem; nearest: --api-key"),
        ("SECRET", "unrecognized arguments: a value that belongs to none"),
        ("--max-num-seqs http://me:SECRET@host", "'http://host'"),
        ("--max-model-len wide", "argument --max-model-len: invalid human_readable_int_or_auto value: 'wide'"),
        ("--config no.yaml", "no.yaml"),
        ("--help", "--help starts no server"),
    ],
)
def test_arguments_that_vllm_has_not_are_wrong_usage(asked: Asked, arguments: str, said: str) -> None:
    """A typo is never passed over: two servers that seem to share would not."""
    usage = asked.answer(arguments)["usage"]
    assert usage.startswith("--vllm-args: ")
    assert said in usage
    assert "\n" not in usage
    assert "SECRET" not in usage


def test_a_password_in_a_url_is_not_repeated(asked: Asked) -> None:
    answer = asked.answer(
        """--speculative-config '{"model": "http://me:SECRET@host/draft", "num_speculative_tokens": 1}'"""
    )
    assert "failed" in answer
    assert "host/draft" in str(answer)
    assert "SECRET" not in str(answer)


@pytest.fixture
def config(tmp_path: Path) -> str:
    file = tmp_path / "kv.yaml"
    file.write_text("tiers: [{kind: memory, capacity: 1MiB}]\n")
    return str(file)


def test_the_command_compares_two_servers(asked: Asked, config: str, tmp_path: Path) -> None:
    """Typed by a user, with a variable that one server has: vLLM runs in two environments then. JSON holds it all."""
    second = f"VLLM_MLA_DISABLE=1 vllm serve {asked.model} --max-model-len 2048 --max-num-seqs 512 --port 9000"
    command = [sys.executable, "-m", "nixl_offload.cli.main", "check", config, "--json"]
    done = subprocess.run(
        [*command, "--vllm-args", str(asked.model), "--vllm-args", second],
        env={**os.environ, **asked.environment, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert [each["kind"] for each in report["sections"]] == ["environment", "hashes", "servers", "memory"]
    section = report["sections"][2]
    facts = section["facts"]
    assert (facts["share"], facts["because"]) == (False, ["max_model_len", "VLLM_MLA_DISABLE"])
    assert facts["differences"] == [
        {"path": "model_config.max_model_len", "values": [4096, 2048]},
        {"path": "environment.VLLM_MLA_DISABLE", "values": ["(not there)", "1"]},
    ]
    assert [each["name"] for each in facts["harmless"]] == ["port", "max_num_seqs"]
    assert [each["weights"] for each in facts["servers"]] == ["content", "content"]
    assert [(line["state"], line["words"]) for line in section["findings"]][:2] == [
        ("warning", "these two servers share nothing, because max_model_len and VLLM_MLA_DISABLE differ"),
        ("warning", "max_model_len: 4096 | 2048"),
    ]
    assert [each.name for each in tmp_path.iterdir()] == ["kv.yaml"], "nothing stays"


@pytest.fixture
def check(
    asked: Asked, config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """The command, in this process; it asks the module's child, for importing vLLM takes so long."""
    monkeypatch.setattr(check_servers, "ChildProcess", lambda variables: contextlib.nullcontext(asked.child))

    def run(*texts: str) -> tuple[int, str, str]:
        code = main(["check", config, *(word for text in texts for word in ("--vllm-args", f"{asked.model} {text}"))])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


def test_what_a_person_reads(check: Callable[..., tuple[int, str, str]]) -> None:
    code, out, _ = check("--max-model-len 1024", "--max-model-len 2048 --no-enable-prefix-caching --seed 3")
    assert code == 0
    _, _, below = out.partition("\nTwo servers\n")
    because = "max_model_len and enable_prefix_caching differ"
    assert below.splitlines()[:4] == [
        f"  warning  sharing     these two servers share nothing, because {because}",
        "  warning  differs     max_model_len: 1024 | 2048",
        "  warning  differs     enable_prefix_caching: True | False",
        "  ok       harmless    seed: 0 | 3 (how the next token is chosen from the logits)",
    ]
    assert below.splitlines()[4].startswith(
        "  warning  offloading  the second stores and loads nothing: prefix caching"
    )
    _, out, _ = check("", "--seed 3")
    assert "\n  warning  sharing   these two servers have one namespace" in out, "the config has memory alone"
    code, out, _ = check("")
    _, _, below = out.partition("\nServer\n")
    assert (code, below.split()[:3]) == (0, ["ok", "model", "tiny,"])


def test_a_typo_is_exit_code_2_before_anything_is_tried(check: Callable[..., tuple[int, str, str]]) -> None:
    code, out, said = check("", "--max-modl-len 2048")
    assert (code, out) == (2, "")
    wrong = "unrecognized arguments: --max-modl-len; nearest: --max-model-len"
    assert said.splitlines()[-1] == f"nixl-offload: the second: --vllm-args: {wrong}"


def test_a_configuration_that_vllm_refuses_is_an_unknown_line(check: Callable[..., tuple[int, str, str]]) -> None:
    code, out, _ = check("", "--max-model-len 99999")
    assert code == 0
    said = "the second: vLLM makes no configuration of them here: User-specified max_model_len (99999) is greater than"
    assert f"\nTwo servers\n  unknown  servers  {said}" in out
