"""Which fields of vLLM's configuration cannot change a stored byte, each with its reason. Every other field is part of
the namespace, so a field that a future vLLM adds costs a cold cache and not a wrong answer.

A field is harmless if one of these holds:

- it never reaches the computation of KV (names, ports, logs, sampling, capacities);
- one vLLM engine mixes its values in one prefix cache (how requests are batched, how prompts are cut);
- vLLM hands KV from one engine to another across it (its P/D transfer pairs eager with compiled engines): the same
  operations in the same types, which differ in rounding alone;
- the namespace has it already, in another form.

Threading: constants. Class names are vLLM's; a base class's fields hold for classes derived from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_BATCH = "how requests are batched"
_BLOCKS = "how many blocks there are, not what is in them"
_COMPILE = "how the same operations are compiled or captured: rounding"
_LOGS = "what is logged or measured"
_OWN_FIELD = "the namespace has it as a field of its own"
_SAMPLING = "how the next token is chosen from the logits"

_BY_REASON: Final[Mapping[str, Mapping[str, str]]] = {
    "VllmConfig": {
        "what is returned beside tokens": "aux_output_config",
        "where encoder outputs are kept": "ec_manager_config",
        "how encoder outputs travel": "ec_transfer_config",
        "a name": "instance_id",
        "who hears of blocks": "kv_events_config",
        "how KV travels; what of it counts is our own config": "kv_transfer_config",
        _LOGS: "logging_config observability_config profiler_config",
        "where weights lie while they wait": "offload_config",
        _COMPILE: "optimization_level",
        "made from model_config, and from files that it names, which count": "quant_config",
        "how answers are parsed": "reasoning_config",
        "how the server stops": "shutdown_timeout",
        _SAMPLING: "structured_outputs_config watermark_config",
        "who notices a hanging engine": "watchdog_config",
        "how new weights travel": "weight_transfer_config",
    },
    "ModelConfig": {
        "which files requests may name": "allowed_local_media_path",
        "which addresses requests may name": "allowed_media_domains",
        _BATCH: "disable_cascade_attn",
        "what becomes of memory while the engine sleeps": """
            enable_cumem_allocator enable_nccl_comm_suspend enable_sleep_mode sleep_mode_backend
            sleep_mode_offload_cudagraph sleep_preserve_parameter_names
        """,
        "a request's embeddings are in its block hashes": "enable_prompt_embeds",
        _LOGS: "enable_trace_replay",
        _COMPILE: "enforce_eager",
        "where hf_config was read": "hf_config_path",
        "hf_config has them applied": "hf_overrides",
        "a credential": "hf_token",
        _SAMPLING: "logits_processors logprobs_mode max_logprobs return_sampling_mask seed use_fp64_gumbel",
        _OWN_FIELD: "model revision",
        "how many threads read requests": "renderer_num_workers",
        "a name": "served_model_name",
        "whether the server itself makes token ids, which the keys hold": "skip_tokenizer_init",
        "models_of names a tokenizer that is not the model's own, at its revision": "tokenizer tokenizer_revision",
    },
    "MultiModalConfig": {
        "in which order a prompt names its items; keys hold its token ids": "interleave_mm_strings",
        "how many items a request may have": "limit_per_prompt",
        "what is written, not what is read": "mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin",
        "how inputs travel between processes": "mm_ipc_gpu_memory_gb mm_tensor_ipc",
        "what processed inputs are kept": """
            mm_processor_cache_gb mm_processor_cache_type mm_shm_cache_max_object_size_mb
        """,
        _BLOCKS: "skip_mm_profiling",
    },
    "CacheConfig": {
        "a note of vLLM's to itself": "_block_size_resolved",
        "where a hit may end": "cache_hit_alignment_tokens",
        _BLOCKS: """
            gpu_memory_utilization kv_cache_max_concurrency kv_cache_memory_bytes kv_cache_size_tokens
            num_cpu_blocks num_gpu_blocks num_gpu_blocks_override simple_cpu_offload_num_blocks
        """,
        _OWN_FIELD: "hash_block_size",
        "another way of keeping the same blocks": "kv_offloading_backend kv_offloading_size",
        "which blocks stay": "prefix_cache_retention_interval",
        "who chose block_size, which counts": "user_specified_block_size",
    },
    "ParallelConfig": {
        "how processes reach each other": """
            _api_process_count _api_process_rank _coord_store_port _data_parallel_master_port_list
            cpu_distributed_timeout_seconds data_parallel_backend data_parallel_master_ip data_parallel_master_port
            data_parallel_rpc_port disable_nccl_for_dp_synchronization distributed_executor_backend
            distributed_timeout_seconds dp_sync_interval enable_shm_tensor_arena master_addr master_port
        """,
        "where ranks run": """
            assigned_physical_gpu_ids nnodes node_rank numa_bind numa_bind_cpus numa_bind_nodes placement_group
            ray_runtime_env
        """,
        "which requests an engine is given": "data_parallel_external_lb data_parallel_hybrid_lb",
        "which of equal engines this is": "data_parallel_index data_parallel_rank data_parallel_rank_local",
        "how many equal engines there are; an elastic one changes it as it runs": "data_parallel_size",
        "how many equal engines there are on this host": "data_parallel_size_local",
        _BATCH: "dbo_decode_token_threshold dbo_prefill_token_threshold enable_dbo ubatch_size",
        _OWN_FIELD: """
            decode_context_parallel_size pipeline_parallel_size prefill_context_parallel_size tensor_parallel_size
            world_size
        """,
        "the order of a sum, which also depends on the size of a batch: rounding": "disable_custom_all_reduce",
        "how many equal engines there may be": "elastic_ep_max_dp_size enable_elastic_ep",
        _SAMPLING: "enable_batch_sharded_sampling",
        "which device computes an expert; it changes as an engine runs": "enable_eplb eplb_config",
        "which weights a rank reads of those it needs": "enable_ep_weight_filter",
        "what follows a failure": "enable_fault_tolerance fault_tolerance_config",
        "how weights are read": "max_parallel_loading_workers",
        "which rank this process is": "rank",
        _LOGS: "ray_workers_use_nsight",
    },
    "SchedulerConfig": {
        _BATCH: """
            async_scheduling enable_chunked_prefill long_prefill_token_threshold
            long_prefill_token_threshold_adaptive max_num_active_seqs max_num_batched_tokens
            max_num_encoder_input_tokens max_num_queued_reqs max_num_queued_tokens max_num_scheduled_tokens
            max_num_seqs policy prefill_schedule_interval scheduler_reserve_full_isl
        """,
        "what encoder outputs are kept": "encoder_cache_size",
        "how answers are sent": "stream_interval",
        _BLOCKS: "watermark",
    },
    "LoadConfig": {
        "where weights were read": "download_dir",
        "how weights are read": """
            safetensors_load_strategy safetensors_prefetch_block_size safetensors_prefetch_num_threads
        """,
        _LOGS: "use_tqdm_on_load",
    },
    "LoRAConfig": {
        "how many adapters are kept": "max_cpu_loras",
        "how many adapters a batch may have": "max_loras",
    },
    "SpeculativeConfig": {
        _SAMPLING: """
            draft_sample_method fly_entropy_threshold fly_entropy_top_k fly_window_size rejection_sample_method
            synthetic_acceptance_length synthetic_acceptance_rates
        """,
        _COMPILE: "enforce_eager",
        "draft_model_config has its name and weights": "model",
        "draft_model_config has it": "revision",
        "it is model_config": "target_model_config",
        "it is parallel_config": "target_parallel_config",
    },
    "KernelConfig": {
        _COMPILE: "enable_cutedsl_warmup enable_jit_warmup ir_op_priority",
        "kernels are chosen by their speed, anew in each process": """
            enable_flashinfer_autotune enable_rocm_segmented_attn_autotune
        """,
    },
    "AttentionConfig": {
        "the namespace has what the ranks really use": "backend",
    },
    "CompilationConfig": {
        _COMPILE: """
            backend cache_dir compile_cache_save_format compile_mm_encoder compile_ranges_endpoints compile_sizes
            cudagraph_capture_sizes cudagraph_copy_inputs cudagraph_decoder_replay cudagraph_mm_encoder
            cudagraph_mode cudagraph_num_of_warmups cudagraph_specialize_lora custom_ops
            decoder_replay_cudagraph_capture_sizes decoder_replay_trim_threshold disabled_custom_ops
            dynamic_shapes_config enabled_custom_ops encoder_cudagraph_max_frames_per_batch
            encoder_cudagraph_max_vision_items_per_batch encoder_cudagraph_token_budgets fast_moe_cold_start
            inductor_compile_config inductor_passes ir_enable_torch_wrap local_cache_dir max_cudagraph_capture_size
            mode pass_config splitting_ops traced_files use_inductor_graph_partition
        """,
        _LOGS: "compilation_time debug_dump_path encoder_compilation_time",
        "the model's layers, as the ranks tell them": "static_all_moe_layers static_forward_context",
    },
    "PretrainedConfig": {
        _OWN_FIELD: "_commit_hash",
        "where the config was read": "_name_or_path",
        "who wrote the file; the version that runs counts": "transformers_version",
    },
}

EXCUSED: Final[Mapping[str, Mapping[str, str]]] = {
    kind: {name: reason for reason, names in reasons.items() for name in names.split()}
    for kind, reasons in _BY_REASON.items()
}
"""Class -> field -> why it is harmless."""

EXCUSED_WITH_SHARDS: Final[Mapping[str, str]] = {
    "cache_config.effective_attention_block_size": "how a kernel cuts blocks: the layers' digest has it",
    "cache_config.kv_cache_layout": "how blocks lie in memory: shards have one order",
    "environment.VLLM_PP_LAYER_PARTITION": "where pipeline stages begin: the ranges of layers have it",
    "speculative_config.draft_model_config.hf_config.draft_vocab_size": (
        "which tokens a draft may propose; vLLM fills it in where it loads the model, which is another process with TP"
    ),
    "speculative_config.draft_tensor_parallel_size": "that of the model: with another one chunks are not cut",
}
"""Settings, by path, that cannot change a byte of a chunk that is cut into shards."""
