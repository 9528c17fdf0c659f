"""Makes the namespace from vLLM's final configuration and the ranks' geometries. Says when vLLM's keys are worthless.

Threading: pure functions. ``ServingTiers`` makes the namespace on a thread of its own, which reads models' and
settings' files. Functions that read no files run on the scheduler's thread.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import logging
import os
import re
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple, Protocol

import torch
import vllm
import vllm.envs
from vllm.config import ModelConfig, VllmConfig
from vllm.platforms import current_platform
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.request import Request

from nixl_offload.chunk.authentication import SCHEME
from nixl_offload.config import Config
from nixl_offload.errors import NamespaceError
from nixl_offload.identity.excused import ALSO_COUNTED, EXCUSED, EXCUSED_ENVIRONMENT, EXCUSED_WITH_SHARDS
from nixl_offload.identity.namespace import (
    SHARD_ORDER,
    GroupFields,
    Namespace,
    NamespaceFields,
    Setting,
    make_namespace,
)
from nixl_offload.identity.settings import DigestFile, collect, plain_text, text_setting
from nixl_offload.identity.weights import FilesDigest, is_local
from nixl_offload.tiers.slots import ranks_together, replicas_of_slots
from nixl_offload.vllm.messages import RankGeometry

logger = logging.getLogger(__name__)

_COMMIT: Final = r"[0-9a-f]{40}"
_SNAPSHOT: Final = re.compile(rf"models--(?P<repository>[^/]+)/snapshots/(?P<commit>{_COMMIT})/?$")
_PLUGIN_GROUPS: Final = ("vllm.general_plugins", "vllm.platform_plugins")
_DRAFT: Final = "speculative_config.draft_model_config"
_TOKENIZER: Final = "model_config.tokenizer"
_CONTENT_DIGEST: Final = re.compile(r"[0-9a-f]{64}|[0-9a-f]{128}")
"""vLLM's digest of an image, a sound or a video: BLAKE3, SHA-256 or SHA-512."""
_READS_FILES: Final = {
    *("auto", "dummy", "fastsafetensors", "hf", "instanttensor", "mistral", "npcache", "pt", "runai_streamer"),
    *("runai_streamer_sharded", "safetensors", "sharded_state"),
}
"""vLLM's load formats that read a model's own files."""


class ReadFiles(Protocol):
    """As ``identity.weights.digest_files``."""

    def __call__(self, path: str, *, alone: bool) -> FilesDigest: ...


class ModelName(NamedTuple):
    """What identifies a model."""

    name: str
    """For a local model, the last part of its path: another server may have the same files elsewhere."""
    revision: str | None
    """The commit, if it is known."""
    files: str | None
    """The file or directory whose content identifies the model; None: name and revision identify it."""


def reason_to_stay_off(vllm_config: VllmConfig, config: Config) -> str | None:
    """Return why this engine must not store or load, as a sentence; None: it may. The same on every rank."""
    cache = vllm_config.cache_config
    if not cache.enable_prefix_caching and not config.serve_without_prefix_caching:
        return (
            "prefix caching is off in vLLM's final configuration, which vLLM also decides by itself where cached KV "
            "must not be reused; serve_without_prefix_caching: true in the config overrules this"
        )
    multimodal = vllm_config.model_config.multimodal_config
    if not cache.enable_prefix_caching and multimodal is not None and not multimodal.mm_processor_cache_gb:
        return "without prefix caching and with --mm-processor-cache-gb 0 vLLM names images by a counter of the process"
    algorithm = str(cache.prefix_caching_hash_algo)
    if config.stored and algorithm.startswith("xxhash") and os.environ.get("PYTHONHASHSEED") is None:
        return (
            f"prefix caching hashes with {algorithm} and PYTHONHASHSEED is not set, so block hashes differ in every "
            "process and nothing stored would ever be found again; set PYTHONHASHSEED, or use "
            "--prefix-caching-hash-algo sha256"
        )
    return None


def name_model(model_config: ModelConfig) -> ModelName:
    """Identify a model. Touches the filesystem, but reads no file."""
    if model_config.model_weights:  # streamed from an object store; ``model`` is a directory of copied configs then
        return ModelName(plain_text("model_weights", str(model_config.model_weights)), None, None)
    commit = getattr(model_config.hf_config, "_commit_hash", None)
    return _name(str(model_config.model), model_config.revision, commit)


def _name(path: str, asked: str | None, commit: str | None = None) -> ModelName:
    """Identify the model at ``path``, which may be a Hub id. ``asked``: the revision that was asked for."""
    snapshot = _SNAPSHOT.search(path)
    # When it is offline, vLLM makes such a path of a Hub id.
    if snapshot is not None and os.path.isdir(path) and _is_untouched(path):
        return ModelName(snapshot["repository"].replace("--", "/"), snapshot["commit"], None)
    if is_local(path):
        return ModelName(os.path.basename(os.path.normpath(path)), None, path)
    commit = getattr(asked, "resolved", None) or commit
    return ModelName(path, str(commit) if commit else None if asked is None else str.__str__(asked), None)


def _is_untouched(snapshot: str) -> bool:
    """Whether a snapshot in the Hub's cache is as it was downloaded: each file a link to a blob."""
    blobs = os.path.realpath(os.path.join(snapshot, "..", "..", "blobs"))
    files = [os.path.join(directory, name) for directory, _, names in os.walk(snapshot) for name in names]
    return bool(files) and all(os.path.dirname(os.path.realpath(file)) == blobs for file in files)


def models_of(vllm_config: VllmConfig, sources: Collection[str] = ()) -> dict[str, ModelName]:
    """Return all models that the stored KV depends on, by their path in the configuration.

    A draft model is among them, and so are ``sources`` that ranks have named. So is a tokenizer from elsewhere, or of
    another revision: some models compute with it.
    """
    model = vllm_config.model_config
    models = {"model_config": name_model(model)}
    tokenizer = (model.tokenizer, model.tokenizer_revision)
    if model.tokenizer and tokenizer != (model.model, model.revision):
        models[_TOKENIZER] = _name(str(model.tokenizer), model.tokenizer_revision)
    speculative = vllm_config.speculative_config
    draft = getattr(speculative, "draft_model_config", None)
    if draft is not None and draft is not vllm_config.model_config:
        models[_DRAFT] = name_model(draft)
    own = {model.model, getattr(draft, "model", None)}
    named = sorted((_name(source, None) for source in sources if source not in own), key=str)
    return models | {f"sources.{number}": name for number, name in enumerate(named)}


def build_namespace(
    vllm_config: VllmConfig,
    offloading: OffloadingConfig,
    config: Config,
    ranks: Sequence[RankGeometry],
    read: ReadFiles,
) -> Namespace:
    """Return the fingerprint of everything that makes bytes interchangeable between two engines.

    ``ranks``: the geometry of each, in order. ``read`` is called for models, and for directories and large files that
    settings name. Raises what ``read`` raises, and NamespaceError; also if the ranks do not agree on the shards.
    """
    plan, digests = ranks[0].plan, tuple(rank.digest for rank in ranks)
    if any(rank.plan != plan for rank in ranks):
        raise NamespaceError("the ranks of this engine do not agree on how chunks are cut into shards")
    models = models_of(vllm_config, {source for rank in ranks for source in rank.sources})
    contents = {path: read(model.files, alone=False) for path, model in models.items() if model.files is not None}
    weights = {path: content.digest for path, content in contents.items()}
    loaded = _loaded_weights(vllm_config, models, contents, ranks)
    model = models.pop("model_config")

    def digest_file(path: str) -> str:
        return read(path, alone=os.path.isfile(path)).digest

    settings = _settings_of(vllm_config, digest_file) | _environment(digest_file) | _libraries()
    for path, other in models.items():
        settings[f"{path}.name"], settings[f"{path}.revision"] = other.name, other.revision
        settings[f"{path}.weights"] = weights.get(path)
    if config.authenticate is not None:
        settings["authenticate"] = SCHEME  # so that chunks without a MAC are never looked up or reported
    if plan.is_cut:
        settings = {name: value for name, value in settings.items() if name not in EXCUSED_WITH_SHARDS}
        # If ranks differ, for example by their scales, engines of other sizes share nothing.
        digests = digests[:1] if len(set(digests)) == 1 else digests
    if not plan.is_cut or _weights_depend_on_sizes(vllm_config):
        parallel = vllm_config.parallel_config
        settings |= {
            "tp": parallel.tensor_parallel_size,
            "pp": parallel.pipeline_parallel_size,
            "pcp": parallel.prefill_context_parallel_size,
            "dcp": parallel.decode_context_parallel_size,
        }
    seed = os.environ.get("PYTHONHASHSEED")
    backends = sorted({name for rank in ranks for name in rank.attention_backends})
    namespace_fields = NamespaceFields(
        tenant=config.tenant,
        engine=f"vllm {vllm.__version__}",
        platform=_platform(),
        model=model.name,
        revision=model.revision,
        hash_algorithm=str(vllm_config.cache_config.prefix_caching_hash_algo),
        hash_seed=None if seed is None else repr(seed),
        settings=settings,
        attention_backend="+".join(backends) or None,
        weights=weights.get("model_config"),
        dtype=offloading.model.dtype,
        tokens_per_block=max(group.tokens_per_block for group in offloading.groups),
        blocks_per_chunk=offloading.cache.blocks_per_chunk,
        tokens_per_hash=offloading.cache.tokens_per_hash,
        groups=tuple(
            GroupFields(group.group_id, group.tokens_per_block, _shard_bytes(ranks, at))
            for at, group in enumerate(offloading.groups)
        ),
        ranks=digests,
        shards=plan.shards,
        layers=plan.layers.begins,
        shard_order=SHARD_ORDER if plan.is_cut else str(offloading.kv_cache_layout or "default"),
    )
    namespace = make_namespace(namespace_fields, plan)
    machines = [rank.machine for rank in ranks]
    together = [
        (namespace.slot_bytes(group.group_id), ranks_together(machines, cut.replicas))
        for group, cut in zip(offloading.groups, plan.groups, strict=True)
    ]
    return with_loaded_weights(replace(namespace, slot_replicas=replicas_of_slots(together)), loaded)


def _weights_depend_on_sizes(vllm_config: VllmConfig) -> bool:
    """Whether engines of other sizes compute with other weights. Each rank draws dummy weights for its own part; and
    scales its own part if weights are quantized only when they are loaded.
    """
    speculative = vllm_config.speculative_config
    models = [vllm_config.model_config, getattr(speculative, "draft_model_config", None)]
    return vllm_config.load_config.load_format == "dummy" or any(
        model is not None
        and model.quantization is not None
        and not any(hasattr(model.hf_config, name) for name in ("quantization_config", "compression_config"))
        for model in models
    )


def _shard_bytes(ranks: Sequence[RankGeometry], group: int) -> tuple[int, ...]:
    """Return the sizes of a group's shards by number; 0: no rank has it. Raises NamespaceError if replicas disagree."""
    found: dict[int, int] = {}
    for rank in ranks:
        for (of_group, number), size_bytes in zip(rank.plan.shards_of(rank.rank), rank.slot_bytes, strict=True):
            if of_group == group and found.setdefault(number, size_bytes) != size_bytes:
                raise NamespaceError("the ranks of this engine do not agree on how large shards are")
    return tuple(found.get(number, 0) for number in range(ranks[0].plan.shards))


def _loaded_weights(
    vllm_config: VllmConfig,
    models: Mapping[str, ModelName],
    contents: Mapping[str, FilesDigest],
    ranks: Sequence[RankGeometry],
) -> str | None:
    """Return a digest of the weights that ranks have in memory; None if the files of ``models`` identify them.

    Files are preferred: engines of other sizes share them, and memory that no file fills differs in each process.
    ``contents``: digests of the models that have files.
    """
    load = vllm_config.load_config
    draft_load = getattr(vllm_config.speculative_config, "draft_load_config", None) or load
    formats = {str(load.load_format), str(draft_load.load_format)}
    are_known = all(
        contents[path].weight_files if path in contents else re.fullmatch(_COMMIT, model.revision or "")
        for path, model in models.items()
        if path != _TOKENIZER
    )
    if formats == {"dummy"} or (formats <= _READS_FILES and are_known):
        return None
    return digest_of_ranks([rank.weights for rank in ranks])


def digest_of_ranks(digests: Sequence[str | None]) -> str:
    """Return one digest of all ranks' digests. If any rank has none, return a random name, so nothing is shared."""
    if None in digests:
        return f"unknown-{secrets.token_hex(16)}"
    return hashlib.sha256("".join(str(digest) for digest in digests).encode("ascii")).hexdigest()


def with_loaded_weights(first: Namespace, loaded: str | None) -> Namespace:
    """Return ``first`` changed for the weights ``loaded``; unchanged for None. Files and settings count as they were at
    the start: they say nothing about weights loaded since.
    """
    if loaded is None:
        return first
    settings = {**first.fields.settings, "loaded_weights": loaded}
    changed = make_namespace(replace(first.fields, settings=settings), first.plan)
    return replace(changed, slot_replicas=first.slot_replicas)


def _settings_of(vllm_config: VllmConfig, digest_file: DigestFile) -> dict[str, Setting]:
    """Return all of vLLM's settings that are not excused. Warns if some differ in every process."""
    found = collect(vllm_config, EXCUSED, digest_file)
    if found.incomparable:
        logger.warning(
            "Nothing stored now will be found after a restart or by another server: vLLM's configuration holds values "
            "that cannot be compared between processes (%s)",
            ", ".join(found.incomparable),
        )
    return found.values


def _environment(digest_file: DigestFile) -> dict[str, Setting]:
    """Return the variables that are set and not excused: they may choose kernels, layouts, or scales."""
    names = [*(name for name in vllm.envs.environment_variables if name not in EXCUSED_ENVIRONMENT), *ALSO_COUNTED]
    found = {name: os.environ[name] for name in sorted(names) if name in os.environ}
    return {f"environment.{name}": text_setting(name, text, digest_file) for name, text in found.items()}


def _libraries() -> dict[str, Setting]:
    """Return versions of other code that decides what is computed: transformers, and plugins that bring models."""
    found: dict[str, Setting] = {"library.transformers": importlib.metadata.version("transformers")}
    for group in _PLUGIN_GROUPS:
        for entry in importlib.metadata.entry_points(group=group):
            if entry.value.startswith(("vllm.", "nixl_offload.")):
                continue
            metadata = entry.dist.metadata if entry.dist is not None else None  # empty where there is no such file
            version = metadata["Version"] if metadata is not None and "Version" in metadata else None
            found[f"library.{entry.value}"] = version
    return found


def _platform() -> str:
    """Return the kind of device: it decides how an attention kernel lays values out inside a page."""
    kind = str(current_platform.device_type)
    if kind != "cpu":
        return f"{kind}:{current_platform.get_device_capability()}"
    isa = current_platform.get_cpu_architecture().name
    return f"cpu:{isa}:{'amx' if getattr(torch.cpu, '_is_amx_tile_supported', bool)() else 'plain'}"


def has_lasting_keys(request: Request) -> bool:
    """Whether equal keys mean equal inputs in every process.

    vLLM names an image by a digest of its content, or by the user's ``uuid``. Block hashes hold that name, prefixed by
    a LoRA adapter's. A uuid passes for a digest if it has 64 or 128 hex digits, or if vLLM digests it because the
    request has ``mm_processor_kwargs`` or ``media_io_kwargs``.
    """
    adapter = f"{request.lora_request.lora_name}:" if request.lora_request is not None else ""
    return all(
        _CONTENT_DIGEST.fullmatch(feature.identifier.removeprefix(adapter)) is not None
        for feature in request.mm_features
    )
