"""The namespace, made from vLLM's own configuration objects: whatever may change a stored byte parts two servers, and
what cannot does not.
"""

from __future__ import annotations

import dataclasses
import sys
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm.envs
from huggingface_hub._revision import ResolvedRevision
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_offload.base import CanonicalKVCaches

from examples.demo.model import TINY, write_model
from nixl_offload.chunk.shards import make_plan
from nixl_offload.config import Config
from nixl_offload.errors import NamespaceError
from nixl_offload.identity.excused import ALSO_COUNTED, EXCUSED, EXCUSED_ENVIRONMENT, EXCUSED_WITH_SHARDS
from nixl_offload.identity.namespace import Namespace
from nixl_offload.identity.settings import collect
from nixl_offload.identity.weights import FilesDigest, digest_files
from nixl_offload.vllm.identity import (
    build_namespace,
    has_lasting_keys,
    models_of,
    name_model,
    reason_to_stay_off,
    with_loaded_weights,
)
from nixl_offload.vllm.kv_caches import RankCaches
from nixl_offload.vllm.messages import RankGeometry
from nixl_offload.vllm.rank_identity import allocation_digest
from tests.families.checkpoints import write_vision
from tests.vllm import manager_rig

Build = Callable[..., VllmConfig]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with ``base``, a text model, and ``vision``."""
    directory = tmp_path_factory.mktemp("models")
    write_model(directory / "base", TINY)
    write_vision(directory / "vision")
    return directory


@pytest.fixture(scope="module")
def build(models: Path) -> Build:
    """Build vLLM's final configuration as ``vllm serve`` does, from the same arguments."""

    def made(model: str = "base", **arguments: Any) -> VllmConfig:
        options = {"dtype": "float32", "skip_tokenizer_init": model == "base", "max_model_len": 512, **arguments}
        return EngineArgs(model=str(models / model), **options).create_engine_config()

    return made


def config(*tiers: dict[str, Any], **fields: Any) -> Config:
    return manager_rig.config_of(*(tiers or (manager_rig.memory_tier(),)), **fields)


def namespace(
    vllm_config: VllmConfig,
    *,
    ranks: Sequence[RankGeometry] | None = None,
    weights: Mapping[str, str] | None = None,
    **fields: Any,
) -> Namespace:
    """Return the namespace of an engine of one rank with this configuration. ``weights``: digests by path, else "w"."""
    return build_namespace(
        vllm_config,
        manager_rig.offloading_config(),
        config(**fields),
        manager_rig.ranks() if ranks is None else ranks,
        lambda path, *, alone: FilesDigest((weights or {}).get(path, "w"), 1),
    )


@pytest.fixture(scope="module")
def base(build: Build) -> Namespace:
    return namespace(build())


COUNTS: list[dict[str, Any]] = [
    {"max_model_len": 1024},  # chooses the factors of LongRoPE
    {"quantization_config": {"linear": {"weight": "fp8_per_tensor_static"}}},
    {"model_impl": "transformers"},
    {"code_revision": "abc"},
    {"dtype": "bfloat16"},
    {"block_size": 32},
    {"kv_cache_dtype": "fp8"},
    {"kv_cache_dtype": "fp8", "kv_cache_dtype_skip_layers": ["2"]},
    {"enable_prefix_caching": False},
    {"generation_config": "vllm"},  # Llama 4 takes the temperature of its attention from there
    {"override_generation_config": {"attn_temperature_tuning": False}},
    {"tokenizer_mode": "slow"},
    {"hf_overrides": {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}},
    {"load_format": "dummy"},
    {"enable_lora": True},
    {"disable_sliding_window": True},
    {"additional_config": {"x": 1}},
]
DOES_NOT: list[dict[str, Any]] = [
    {"max_num_seqs": 3},
    {"max_num_batched_tokens": 8192},
    {"enforce_eager": True},
    {"gpu_memory_utilization": 0.5},
    {"served_model_name": "another"},
    {"seed": 7},
    {"disable_log_stats": True},
    {"enable_chunked_prefill": False, "max_num_batched_tokens": 4096},
    {"max_logprobs": 3},
    {"num_gpu_blocks_override": 77},
    {"shutdown_timeout": 30},
    {"scheduling_policy": "priority"},
    {"download_dir": "/elsewhere"},
]


@pytest.mark.parametrize("arguments", COUNTS + DOES_NOT, ids="-".join)
def test_what_may_change_a_byte_parts_two_servers(build: Build, base: Namespace, arguments: dict[str, Any]) -> None:
    """What cannot does not."""
    other = namespace(build(**arguments))
    assert (other.digest != base.digest) is (arguments in COUNTS)
    assert (other.fields != base.fields) is (arguments in COUNTS)


@pytest.mark.parametrize(
    "arguments",
    [
        {"mm_processor_kwargs": {"size": {"height": 28, "width": 28}}},
        {"media_io_kwargs": {"image": {"rgba_background_color": [0, 0, 0]}}},
        {"limit_mm_per_prompt": {"image": 0}, "language_model_only": True},
    ],
    ids="-".join,
)
def test_how_images_are_processed_parts_two_servers(build: Build, arguments: dict[str, Any]) -> None:
    """The engine's own arguments are in no block hash."""
    assert namespace(build("vision", **arguments)).digest != namespace(build("vision")).digest


def test_the_name_counts_beside_the_weights(build: Build, base: Namespace, models: Path, tmp_path: Path) -> None:
    """``base`` and ``base-ft`` share nothing, ``a/base`` and ``b/base`` do where the files are the same."""
    (models / "base-ft").symlink_to(models / "base")
    assert namespace(build("base-ft")).digest != base.digest
    elsewhere = tmp_path / "base"
    elsewhere.symlink_to(models / "base")
    moved = EngineArgs(model=str(elsewhere), dtype="float32", skip_tokenizer_init=True, max_model_len=512)
    assert namespace(moved.create_engine_config()).digest == base.digest
    assert namespace(build(), weights={str(models / "base"): "others"}).digest != base.digest


def test_what_ranks_have_allocated_counts(build: Build, base: Namespace) -> None:
    (rank,) = manager_rig.ranks()
    for other in (
        replace(rank, digest="f" * 64),
        replace(rank, slot_bytes=(2 * manager_rig.SLOT,)),
        replace(rank, attention_backends=("FLASH_ATTN",)),
    ):
        assert namespace(build(), ranks=[other]).digest != base.digest


@pytest.mark.parametrize(
    ("name", "counts"),
    [("VLLM_MLA_DISABLE", True), ("NVIDIA_TF32_OVERRIDE", True), ("VLLM_LOGGING_LEVEL", False), ("HOME", False)],
)
def test_environment(
    build: Build, base: Namespace, monkeypatch: pytest.MonkeyPatch, name: str, *, counts: bool
) -> None:
    """Variables that choose kernels, layouts or precision."""
    vllm_config = build()
    monkeypatch.setenv(name, "1")
    assert (namespace(vllm_config).digest != base.digest) is counts


def test_plugins_count_with_their_versions(
    build: Build, base: Namespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whatever they are called; a folder without METADATA, which is enough for vLLM, ends nothing. So does the version
    of transformers, which holds image processors and rope functions.
    """
    with monkeypatch.context() as patch:
        patch.setattr("importlib.metadata.version", lambda name: "99.0")
        found = {base.digest, namespace(build()).digest}
    for version in (None, "1.0", "2.0"):
        info = tmp_path / str(version) / f"vllm_fancy-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "entry_points.txt").write_text("[vllm.platform_plugins]\nfancy = vllm_fancy:register\n")
        if version is not None:
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm-fancy\nVersion: {version}\n")
        with monkeypatch.context() as patch:
            vllm_config = build()
            patch.syspath_prepend(str(info.parent))
            found.add(namespace(vllm_config).digest)
    assert len(found) == 5


def test_a_tokenizer_of_its_own_counts_by_its_files(build: Build, base: Namespace, models: Path) -> None:
    """Some models make tables from it."""
    other = build(tokenizer=str(models / "vision"))
    assert models_of(other)["model_config.tokenizer"].files == str(models / "vision")
    assert namespace(other).digest != base.digest


# Models by name


COMMIT = "607a30d783dfa663caf39e06633721c8d4cfcd7e"


def model_config(**fields: Any) -> Any:
    defaults = {"model": "org/tiny", "model_weights": "", "revision": None, "hf_config": SimpleNamespace()}
    return SimpleNamespace(**{**defaults, **fields})


def test_a_model_of_the_hub_is_known_by_its_commit(tmp_path: Path) -> None:
    """By a ``ResolvedRevision``, a str of another type, or by what huggingface_hub left in the config."""
    by_commit = ("org/tiny", COMMIT, None)
    assert name_model(model_config(revision=ResolvedRevision(initial=None, resolved=COMMIT))) == by_commit
    assert name_model(model_config(hf_config=SimpleNamespace(_commit_hash=COMMIT))) == by_commit
    repository = tmp_path / "models--org--tiny"
    offline = repository / "snapshots" / COMMIT
    offline.mkdir(parents=True)
    (repository / "blobs").mkdir()
    (repository / "blobs" / "1a2b").write_text("{}")
    (offline / "config.json").symlink_to("../../blobs/1a2b")
    assert name_model(model_config(model=str(offline))) == by_commit
    (offline / "model.safetensors").write_bytes(b"of my own")
    assert name_model(model_config(model=str(offline))) == (COMMIT, None, str(offline))
    assert name_model(model_config(revision="v1")) == ("org/tiny", "v1", None)


def test_a_streamed_model_is_known_by_its_address() -> None:
    """``model`` is a directory of vLLM's own then; and no password of an address gets into a manifest."""
    streamed = name_model(model_config(model="/cache/1a2b", model_weights="s3://bucket/base"))
    assert streamed == ("s3://bucket/base", None, None)
    secret = name_model(model_config(model="/cache/1a2b", model_weights="https://me:hunter2@host/base"))
    assert "hunter2" not in secret.name


def test_a_draft_model_counts_with_its_weights(build: Build, models: Path) -> None:
    """Its layers' KV is stored, too. Its parallel size is the model's, or chunks are not cut (``rank_shards``)."""
    write_model(models / "draft", TINY)
    draft: dict[str, Any] = {"method": "draft_model", "model": str(models / "draft"), "num_speculative_tokens": 2}
    made = [
        build(tensor_parallel_size=tp, distributed_executor_backend="mp", speculative_config=dict(draft))
        for tp in (1, 2)
    ]
    assert set(models_of(made[0])) == {"model_config", "speculative_config.draft_model_config"}
    assert len({namespace(made[0], weights={draft["model"]: each}).digest for each in "ab"}) == 2
    assert [each.speculative_config.draft_tensor_parallel_size for each in made] == [1, 2]
    assert len({namespace(each, ranks=cut_ranks(tp)).digest for tp, each in enumerate(made, 1)}) == 1


def loaded(vllm_config: VllmConfig, *sources: str, weights: str | None = "ab") -> object:
    """Return what the namespace has of the weights in a rank's memory."""
    ranks = [replace(rank, weights=weights, sources=sources) for rank in manager_rig.ranks()]
    found = build_namespace(vllm_config, manager_rig.offloading_config(), config(), ranks, digest_files)
    return found.fields.settings.get("loaded_weights")


def test_loaded_weights_count_where_no_file_tells_which_they_are(build: Build, models: Path, tmp_path: Path) -> None:
    base, other = build(), str(write_model(models / "source", TINY))
    for sources in ((), (base.model_config.model,), (other,)):
        assert loaded(base, *sources) is None, sources
    streamed, unpinned, special = build(), build(), build()
    streamed.model_config.model_weights = "s3://bucket/base"
    unpinned.model_config.model = "org/tiny"
    special.load_config.load_format = "ipc_cache"
    elsewhere = [(base, source) for source in ("org/other", "my.plugin", str(tmp_path))]
    for vllm_config, *sources in (*elsewhere, (streamed,), (unpinned,), (special,)):
        found = {loaded(vllm_config, *sources, weights=weights) for weights in ("ab", "cd", None, None)}
        assert len(found) == 4, "ranks that cannot tell share with nobody"
        assert None not in found
        assert loaded(vllm_config, *sources) in found


def test_another_source_counts_by_its_files(build: Build, models: Path) -> None:
    """As a draft does; and by its name alone where it is on the Hub."""
    (rank,) = manager_rig.ranks()
    found = {
        namespace(build(), ranks=[replace(rank, sources=source)], weights={str(models): digest}).digest
        for digest, source in (
            *(("", ("org/x",)), ("", ("org/y",)), ("", ())),
            *(("b", (str(models),)), ("c", (str(models),))),
        )
    }
    assert len(found) == 5


# When to stay off


SERVES = {"serve_without_prefix_caching": True}
COUNTED = {"model": "vision", "enable_prefix_caching": False, "mm_processor_cache_gb": 0}


@pytest.mark.parametrize(
    ("arguments", "tier", "fields", "seed", "words"),
    [
        ({}, "slab", {}, None, None),
        ({"enable_prefix_caching": False}, "slab", {}, None, "prefix caching is off"),
        ({"enable_prefix_caching": False}, "slab", SERVES, None, None),
        ({"prefix_caching_hash_algo": "xxhash"}, "slab", {}, None, "PYTHONHASHSEED"),
        ({"prefix_caching_hash_algo": "xxhash"}, "slab", {}, "0", None),
        ({"prefix_caching_hash_algo": "xxhash"}, "memory", {}, None, None),
        ({"prefix_caching_hash_algo": "sha256_cbor"}, "slab", {}, None, None),
        # A request's own arguments turn the counter into a digest of it, which looks like that of an image.
        (COUNTED, "memory", SERVES, None, "counter"),
        ({**COUNTED, "enable_prefix_caching": None}, "memory", SERVES, None, None),
        ({**COUNTED, "mm_processor_cache_gb": 4}, "memory", SERVES, None, None),
    ],
)
def test_reasons_to_stay_off(
    build: Build,
    monkeypatch: pytest.MonkeyPatch,
    arguments: dict[str, Any],
    tier: str,
    fields: dict[str, Any],
    seed: str | None,
    words: str | None,
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    made = build(**arguments)
    if seed is not None:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    tiers = {"slab": manager_rig.slab_tier(Path("/nowhere")), "memory": manager_rig.memory_tier()}
    reason = reason_to_stay_off(made, config(tiers[tier], **fields))
    assert (reason is None) if words is None else (reason is not None and words in reason)


# Requests


def request(*identifiers: str, lora: str = "", mm_hash: str | None = None) -> Any:
    features = [
        MultiModalFeatureSpec(
            data=None,
            modality="image",
            identifier=f"{lora}:{name}" if lora else name,
            mm_position=PlaceholderRange(0, 4),
            mm_hash=mm_hash or name,
        )
        for name in identifiers
    ]
    return SimpleNamespace(mm_features=features, lora_request=SimpleNamespace(lora_name=lora) if lora else None)


def test_only_digests_of_content_are_lasting_names() -> None:
    assert has_lasting_keys(request())
    assert has_lasting_keys(request("a" * 64))
    assert has_lasting_keys(request("a" * 128, "0" * 64))
    assert has_lasting_keys(request("a" * 64, lora="adapter"))
    assert not has_lasting_keys(request("my-cat", lora="adapter"))
    assert not has_lasting_keys(request("my-cat", mm_hash="a" * 64)), "the identifier is what block hashes hold"
    for name in ("renderer0-mm-0-image-0", "my-cat", "", "a" * 63, "A" * 64, f"{'a' * 64}\n"):
        assert not has_lasting_keys(request("a" * 64, name)), name


# What a rank has allocated

FULL = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.float16)
BLOCKS = 8


def digest(
    specs: dict[str, Any] | None = None,
    *,
    blocks: int = BLOCKS,
    dtype: torch.dtype = torch.float16,
    names: Sequence[str] = ("0", "1"),
    layers: dict[str, Any] | None = None,
    transposed: bool = False,
    **group: Any,
) -> str:
    """Return the digest of two layers, each with a tensor of its own."""
    spec = FULL if specs is None else UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=specs)
    kv_cache_config = KVCacheConfig(blocks, [], [KVCacheGroupSpec(list(names), spec, **group)])
    caches = {}
    for name in names:
        page = torch.zeros((blocks, 2, 16, 16), dtype=dtype)
        caches[name] = page.transpose(1, 2) if transposed else page
    context: Any = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers or {}))
    return allocation_digest(RankCaches(context, kv_cache_config, caches, CanonicalKVCaches([], [])))


def test_the_digest_of_a_rank_is_of_its_layers() -> None:
    half = replace(FULL, dtype=torch.bfloat16)
    window = SlidingWindowSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.float16, sliding_window=32)
    scaled = {"0": SimpleNamespace(_k_scale_float=0.5, _v_scale_float=1.0)}
    found = [
        digest(),
        digest({"0": FULL, "1": half}),
        digest({"0": half, "1": FULL}),
        digest({"0": window, "1": window}),
        digest(dtype=torch.bfloat16),
        digest(names=("1", "0")),
        digest(names=("0", "2")),
        digest(names=("0",)),
        digest(transposed=True),
        digest(is_eagle_group=True),
        digest(layers=scaled),
    ]
    assert len(set(found)) == len(found)
    assert digest(blocks=3) == digest(blocks=16) == found[0], "how many blocks there are, and where they lie"


def test_remote_code_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``auto_map`` may name another repository, whose code changes: transformers names modules by their content."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("sys.modules", dict(sys.modules))
    monkeypatch.setattr("sys.path", list(sys.path))
    found = [digest()]
    code = tmp_path / "repo" / "layers.py"
    code.parent.mkdir()
    for text in ("class Layer: size = 1", "class Layer: size = 2"):
        code.write_text(text)
        with monkeypatch.context() as patch:
            patch.setattr("sys.modules", dict(sys.modules))
            get_class_from_dynamic_module(f"{code.parent}--layers.Layer", "org/model")
            found.append(digest())
    assert len(set(found)) == 3


def cut_ranks(tp: int, *, digests: Sequence[str] = (), shards: int = 4) -> list[RankGeometry]:
    """Return what the ranks of an engine tell whose chunks are cut into four shards."""
    plan = make_plan(shards, [[4]], [[True]], tp)
    told = digests or ["ab"] * tp
    sizes = [(8192,) * len(plan.shards_of(rank)) for rank in range(tp)]
    return [RankGeometry(rank, sizes[rank], told[rank], plan, ("CPU_ATTN",)) for rank in range(tp)]


def test_chunks_that_are_cut_have_one_namespace_for_all_sizes(build: Build) -> None:
    """From vLLM's final configurations of every size; what is no part of it there is part of it still with ranks."""
    configs = {tp: build(tensor_parallel_size=tp, distributed_executor_backend="mp") for tp in (1, 2, 4)}
    cut = {tp: namespace(made, ranks=cut_ranks(tp)) for tp, made in configs.items()}
    assert len({found.digest for found in cut.values()}) == 1
    assert [found.slot_bytes(0) for found in cut.values()] == [4 * 8192, 2 * 8192, 8192]
    stages = build(pipeline_parallel_size=2, distributed_executor_backend="mp")
    uncut = [namespace(made, ranks=manager_rig.ranks(2)).digest for made in (configs[2], stages)]
    assert len({cut[2].digest, *uncut}) == 3, "without a cut, parallel sizes count"
    other = namespace(build(tensor_parallel_size=2, dtype="bfloat16"), ranks=cut_ranks(2))
    assert other.digest != cut[2].digest


@pytest.mark.parametrize(
    "name",
    [
        *(f"{of}_parallel_size" for of in ("tensor", "pipeline", "prefill_context", "decode_context")),
        *("cp_kv_cache_interleave_size", "dcp_kv_cache_interleave_size"),  # the same sizes, other tokens
    ],
)
def test_how_ranks_share_the_model_counts_if_chunks_are_not_cut(build: Build, name: str) -> None:
    """Also if engines have as many ranks, with memory of the same shape."""
    made, ranks = build(), manager_rig.ranks(4)
    before = namespace(made, ranks=ranks).digest
    setattr(made.parallel_config, name, 2)
    assert namespace(made, ranks=ranks).digest != before


def test_the_order_of_ranks_counts_if_chunks_are_not_cut(build: Build) -> None:
    """Ranks of two engines may hold the same parts in another order."""
    made, (first, second) = build(), manager_rig.ranks(2)
    swapped = [replace(first, digest=second.digest), replace(second, digest=first.digest)]
    assert namespace(made, ranks=[first, second]).digest != namespace(made, ranks=swapped).digest


@pytest.mark.parametrize(("machines", "together"), [("aaaa", 2), ("aabb", 2), ("abab", 1), ("", 1)])
def test_replicas_of_a_machine_have_one_copy(build: Build, machines: str, together: int) -> None:
    """That is no part of the namespace, and holds with other weights, too."""
    made = build(tensor_parallel_size=4, distributed_executor_backend="mp")
    plan = make_plan(2, [[2]], [[True]], 4)
    unknown = [replace(rank, plan=plan) for rank in cut_ranks(4)]
    ranks = [replace(rank, machine=machines[rank.rank] if machines else "") for rank in unknown]
    found = namespace(made, ranks=ranks)
    assert dict(found.slot_replicas) == ({8192: together} if together > 1 else {})
    assert found.digest == namespace(made, ranks=unknown).digest
    assert with_loaded_weights(found, "others").slot_replicas == found.slot_replicas


@pytest.mark.parametrize(
    "arguments",
    [{"load_format": "dummy"}, {"quantization": "fp8_per_tensor", "dtype": "bfloat16"}],
    ids=["random", "fp8"],
)
def test_weights_that_are_made_at_start_are_others_for_each_size(build: Build, arguments: dict[str, Any]) -> None:
    """Drawn, or quantized, for each rank's part: not what the files hold."""
    made = [build(tensor_parallel_size=tp, distributed_executor_backend="mp", **arguments) for tp in (1, 2)]
    assert len({namespace(each, ranks=cut_ranks(tp)).digest for tp, each in enumerate(made, 1)}) == 2


def test_ranks_that_know_other_layers_share_with_their_like_alone(build: Build) -> None:
    """As with scales of their own. Ranks that cut chunks otherwise would not find each other's: they are refused."""
    made = build(tensor_parallel_size=2)
    unlike = namespace(made, ranks=cut_ranks(2, digests=["ab", "cd"]))
    assert unlike.fields.ranks == ("ab", "cd")
    assert unlike.digest != namespace(made, ranks=cut_ranks(2)).digest
    ranks, replicas = cut_ranks(2), cut_ranks(8)
    for odd in (manager_rig.ranks(2)[1], cut_ranks(2, shards=2)[1]):
        with pytest.raises(NamespaceError, match="do not agree"):
            namespace(made, ranks=[ranks[0], odd])
    with pytest.raises(NamespaceError, match="do not agree"):
        namespace(made, ranks=[replace(replicas[0], slot_bytes=(4096,)), *replicas[1:]])


# What is excused is there in vLLM


def _nested(annotation: Any) -> Iterator[type]:
    """Yield vLLM's configuration classes that an annotation names. Other classes count, whatever they hold."""
    if dataclasses.is_dataclass(annotation) and getattr(annotation, "__module__", "").startswith("vllm.config."):
        assert isinstance(annotation, type)
        yield annotation
    for part in typing.get_args(annotation):
        yield from _nested(part)


def _classes() -> dict[str, set[str]]:
    """Return the fields of vLLM's configuration classes, as far as these are not excused as a whole."""
    found: dict[str, set[str]] = {}
    waiting: list[type] = [VllmConfig]
    while waiting:
        kind = waiting.pop()
        if kind.__name__ in found:
            continue
        hints = typing.get_type_hints(kind)
        names = found[kind.__name__] = {field.name for field in dataclasses.fields(kind)}
        for name in names - set(EXCUSED.get(kind.__name__, {})):
            waiting += _nested(hints[name])
    return found


def test_no_list_names_a_field_that_there_is_not() -> None:
    """A misspelt excuse excuses nothing, and one for a field that is gone may one day excuse another of that name."""
    classes = _classes()
    assert set(EXCUSED) - {"PretrainedConfig"} <= set(classes)
    for kind, excuses in EXCUSED.items():
        assert set(excuses) <= classes.get(kind, set(excuses)), kind


def test_shards_excuse_only_what_counts_without_them() -> None:
    for path in EXCUSED_WITH_SHARDS:
        *above, name = path.split(".")
        if above == ["environment"]:
            assert name in set(vllm.envs.environment_variables) - set(EXCUSED_ENVIRONMENT)
        elif "hf_config" not in above:  # which has what the model's author wrote
            kind: type = VllmConfig
            for field in above:
                (kind,) = _nested(typing.get_type_hints(kind)[field])
            assert name in {field.name for field in dataclasses.fields(kind)} - set(EXCUSED.get(kind.__name__, {}))


def test_every_variable_of_the_lists_is_read_by_somebody() -> None:
    """A misspelt variable excuses, or counts, nothing."""
    known = set(vllm.envs.environment_variables)
    assert set(EXCUSED_ENVIRONMENT) <= known
    assert not known & set(ALSO_COUNTED)
    missing = set(ALSO_COUNTED) - {"NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"}  # by cuBLAS and torch
    for content in (file.read_text() for file in Path(vllm.__file__).parent.rglob("*.py")):
        missing -= {name for name in missing if f'"{name}"' in content}
    assert not missing


def test_a_field_that_nobody_has_looked_at_counts() -> None:
    """What a new vLLM adds to a class of which some fields are excused."""

    @dataclasses.dataclass
    class SchedulerConfig:
        max_num_seqs: int = 8
        rope_of_the_future: str = "short"

    assert collect(SchedulerConfig(), EXCUSED).values == {"rope_of_the_future": "short"}
