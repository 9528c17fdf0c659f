"""Lists the fields of vLLM's configuration, and its environment variables, that cannot change a stored byte, and why.
All others are part of the namespace, so one that a future vLLM adds causes a cold cache, not a wrong answer.

A field or variable is harmless if one of these holds:

- it never reaches the computation of KV (names, ports, logs, sampling, capacities);
- one vLLM engine mixes KV made with several of its values in one prefix cache (batching, chunked prefill);
- vLLM itself moves KV between engines that differ in it, as P/D transfer does between eager and compiled ones: the
  operations and types are the same, only rounding differs;
- the namespace already has it in another form.

Threading: constants. Classes are vLLM's; fields of a base class also apply to its subclasses. Variables: ``vllm.envs``.
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
    "LoRAConfig": {"how many adapters are kept": "max_cpu_loras", "how many adapters a batch may have": "max_loras"},
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
    "AttentionConfig": {"the namespace has what the ranks really use": "backend"},
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
        "the model's layers, which the ranks digest": "static_all_moe_layers static_forward_context",
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

_VARIABLES_BY_REASON: Final = {
    "how vLLM was built, which its version says": """
        CMAKE_BUILD_TYPE MAX_JOBS NVCC_THREADS VERBOSE VLLM_BUILD_COMMIT VLLM_BUILD_PIPELINE VLLM_BUILD_URL
        VLLM_DOCKER_BUILD_CONTEXT VLLM_IMAGE_TAG VLLM_MAIN_CUDA_VERSION VLLM_SKIP_PRECOMPILED_VERSION_SUFFIX
        VLLM_SKIP_VERSION_SUFFIX VLLM_TARGET_DEVICE VLLM_USE_PRECOMPILED VLLM_USE_PRECOMPILED_RUST
    """,
    "where files and libraries lie": """
        CUDA_HOME LD_LIBRARY_PATH VLLM_ASSETS_CACHE VLLM_ASSETS_CACHE_MODEL_CLEAN VLLM_CACHE_ROOT VLLM_CONFIG_ROOT
        VLLM_CUDA_COMPATIBILITY_PATH VLLM_CUDART_SO_PATH VLLM_ENABLE_CUDA_COMPATIBILITY
        VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR VLLM_HAS_FLASHINFER_CUBIN VLLM_MEDIA_CACHE VLLM_NCCL_INCLUDE_PATH
        VLLM_NCCL_SO_PATH VLLM_RUST_FRONTEND_PATH VLLM_TUNED_CONFIG_FOLDER VLLM_XLA_CACHE_PATH
    """,
    "credentials, and where weights are fetched; their content counts": """
        S3_ACCESS_KEY_ID S3_ENDPOINT_URL S3_SECRET_ACCESS_KEY VLLM_API_KEY VLLM_FASTSAFETENSORS_QUEUE_SIZE
    """,
    "how processes are started, reach each other and end": """
        LOCAL_RANK MOONCAKE_PREFERRED_SEGMENT MOONCAKE_REQUESTER_LOCAL_HOSTNAME VLLM_ALLOW_INSECURE_SERIALIZATION
        VLLM_DISABLE_PYNCCL VLLM_DISTRIBUTED_USE_SPLIT_GROUP VLLM_DP_MASTER_IP VLLM_DP_MASTER_PORT VLLM_DP_RANK
        VLLM_DP_RANK_LOCAL VLLM_DP_SIZE VLLM_EC_SIDE_CHANNEL_HOST VLLM_EC_SIDE_CHANNEL_PORT
        VLLM_ELASTIC_EP_DRAIN_REQUESTS VLLM_ELASTIC_EP_SCALE_UP_LAUNCH VLLM_ENABLE_V1_MULTIPROCESSING
        VLLM_ENGINE_READY_TIMEOUT_S VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS VLLM_HOST_IP VLLM_HTTP_TIMEOUT_KEEP_ALIVE
        VLLM_KEEP_ALIVE_ON_ENGINE_DEATH VLLM_LOOPBACK_IP VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT
        VLLM_MOONCAKE_BOOTSTRAP_PORT VLLM_MOONCAKE_CONNECTOR_TIMEOUT VLLM_MOONCAKE_DISK_STAGING_USABLE_RATIO
        VLLM_MOONCAKE_LOAD_RECV_THREADS VLLM_MOONCAKE_STORE_TIER_LOG VLLM_MQ_MAX_CHUNK_BYTES_MB
        VLLM_MSGPACK_ZERO_COPY_THRESHOLD VLLM_NIC_SELECTION_VARS VLLM_GPU_NIC_PCIE_MAPPING VLLM_NIXL_SIDE_CHANNEL_HOST
        VLLM_NIXL_SIDE_CHANNEL_PORT VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME VLLM_P2P_HANDSHAKE_TIMEOUT_S
        VLLM_P2P_IDLE_TIMEOUT_S VLLM_P2P_MAX_PEERS VLLM_P2P_SIDE_CHANNEL_HOST VLLM_P2P_SIDE_CHANNEL_PORT VLLM_PORT
        VLLM_PROCESS_NAME_PREFIX VLLM_RAY_BUNDLE_INDICES VLLM_RAY_DP_PACK_STRATEGY VLLM_RAY_DP_PLACEMENT_NODE_IPS
        VLLM_RAY_EXTRA_ENV_VARS_TO_COPY VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY VLLM_RAY_PER_WORKER_GPUS
        VLLM_RINGBUFFER_WARNING_INTERVAL VLLM_RPC_BASE_PATH VLLM_SKIP_P2P_CHECK
        VLLM_USE_SPINLOOP_EXT VLLM_WORKER_MULTIPROC_METHOD VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS
    """,
    "which devices and cores ranks run on": """
        CUDA_VISIBLE_DEVICES VLLM_CPU_NUM_OF_RESERVED_CPU VLLM_CPU_OMP_THREADS_BIND
    """,
    "how many blocks and buffers there are": """
        VLLM_CPU_KVCACHE_SPACE VLLM_ENABLE_STARTUP_PLAN VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE
        VLLM_KV_OFFLOAD_MAX_BATCH_DESCRIPTORS VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS VLLM_ROCM_SLEEP_MEM_CHUNK_SIZE
        VLLM_USE_SIMPLE_KV_OFFLOAD VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY VLLM_WEIGHT_OFFLOADING_DISABLE_UVA
        VLLM_WSL2_ENABLE_PIN_MEMORY
    """,
    "what is logged or traced": """
        FORCE_COLOR NO_COLOR VLLM_CONFIGURE_LOGGING VLLM_CPU_CI_ENV VLLM_CUSTOM_SCOPES_FOR_PROFILING
        VLLM_DEBUG_DUMP_PATH VLLM_DEBUG_LOG_API_SERVER_RESPONSE VLLM_DEBUG_MFU_METRICS VLLM_DEBUG_WORKSPACE
        VLLM_DISABLE_LOG_LOGO VLLM_DO_NOT_TRACK VLLM_GC_DEBUG VLLM_GPU_SYNC_CHECK VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES
        VLLM_LOGGING_COLOR VLLM_LOGGING_CONFIG_PATH VLLM_LOGGING_LEVEL VLLM_LOGGING_PREFIX VLLM_LOGGING_STREAM
        VLLM_LOG_BATCHSIZE_INTERVAL VLLM_LOG_MODEL_INSPECTION VLLM_LOG_STATS_INTERVAL VLLM_NO_USAGE_STATS
        VLLM_NVTX_SCOPES_FOR_PROFILING VLLM_PATTERN_MATCH_DEBUG VLLM_REQUEST_BODY_LOG_LEVEL VLLM_TRACE_FUNCTION
        VLLM_USAGE_SOURCE VLLM_USAGE_STATS_SERVER VLLM_XLA_CHECK_RECOMPILATION
    """,
    "what the server's front end accepts, fetches and answers; keys hold token ids and digests of media": """
        VLLM_AUDIO_FETCH_TIMEOUT VLLM_BEAM_ALWAYS_CONSTRAIN_OUTPUT VLLM_CHAT_TEMPLATE_FUEL
        VLLM_CHAT_TEMPLATE_RENDER_TIMEOUT VLLM_DISABLE_REQUEST_ID_RANDOMIZATION VLLM_ENABLE_COHERE_API
        VLLM_ENABLE_RESPONSES_API_STORE VLLM_ENFORCE_STRICT_TOOL_CALLING VLLM_GPT_OSS_HARMONY_SYSTEM_INSTRUCTIONS
        VLLM_GPT_OSS_SYSTEM_TOOL_MCP_LABELS VLLM_HTTP_MAX_REQUEST_BODY_SIZE VLLM_IMAGE_FETCH_TIMEOUT
        VLLM_MAX_AUDIO_CLIP_FILESIZE_MB VLLM_MAX_AUDIO_DECODE_BYTES VLLM_MAX_AUDIO_DECODE_DURATION_S
        VLLM_MAX_AUDIO_PREPROCESS_WORKERS VLLM_MAX_BAD_WORDS_TOTAL_TOKENS VLLM_MAX_COMPLETION_PROMPTS
        VLLM_MAX_EMBED_DECODE_BYTES VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB VLLM_MAX_MEDIA_REQUEST_DECODE_BYTES
        VLLM_MAX_MEDIA_REQUEST_DOWNLOAD_SIZE_MB VLLM_MAX_NUM_BAD_WORDS VLLM_MAX_N_SEQUENCES VLLM_MAX_STOP_STRINGS
        VLLM_MEDIA_CACHE_MAX_SIZE_MB VLLM_MEDIA_CACHE_TTL_HOURS VLLM_MEDIA_FETCH_MAX_RETRIES
        VLLM_MEDIA_LOADING_THREAD_COUNT VLLM_MEDIA_URL_ALLOW_REDIRECTS VLLM_REGEX_COMPILATION_TIMEOUT_S
        VLLM_SERVER_DEV_MODE VLLM_SKIP_MODEL_NAME_VALIDATION VLLM_SYSTEM_START_DATE
        VLLM_TOOL_JSON_ERROR_AUTOMATIC_RETRY VLLM_TOOL_PARSE_REGEX_TIMEOUT_SECONDS VLLM_USE_EXPERIMENTAL_PARSER_CONTEXT
        VLLM_USE_FASTOKENS VLLM_USE_RUST_BENCH VLLM_USE_RUST_FRONTEND VLLM_V1_OUTPUT_PROC_CHUNK_SIZE
        VLLM_V1_USE_OUTLINES_CACHE VLLM_VIDEO_FETCH_TIMEOUT VLLM_XGRAMMAR_CACHE_MB
    """,
    "how the next token is chosen from the logits": """
        VLLM_COMPUTE_NANS_IN_LOGITS VLLM_RAISE_ON_LOGIT_NANS VLLM_USE_FLASHINFER_SAMPLER VLLM_XPU_USE_SAMPLER_KERNEL
    """,
    "how the same operations are compiled or captured: rounding": """
        VLLM_COMPILE_CACHE_SAVE_FORMAT VLLM_DEEP_GEMM_WARMUP VLLM_DISABLE_COMPILE_CACHE VLLM_ENABLE_CUDAGRAPH_GC
        VLLM_ENABLE_INDUCTOR_COORDINATE_DESCENT_TUNING VLLM_ENABLE_INDUCTOR_MAX_AUTOTUNE VLLM_ENABLE_PREGRAD_PASSES
        VLLM_FLASHINFER_AUTOTUNE_SKIP_OPS VLLM_FORCE_AOT_LOAD VLLM_TRITON_FORCE_FIRST_CONFIG
        VLLM_TRITON_JIT_WARMUP_NUM_THREADS VLLM_USE_AOT_COMPILE VLLM_USE_BREAKABLE_CUDAGRAPH VLLM_USE_BYTECODE_HOOK
        VLLM_USE_LAYERNAME VLLM_USE_MEGA_AOT_ARTIFACT VLLM_USE_STANDALONE_COMPILE
    """,
    "which adapters may be loaded; a request's adapter is in its keys": """
        VLLM_ALLOW_RUNTIME_LORA_UPDATING VLLM_LORA_RESOLVER_CACHE_DIR VLLM_LORA_RESOLVER_HF_REPO_LIST
    """,
    "a limit whose effect, max_model_len, counts": """
        VLLM_ALLOW_LONG_MAX_MODEL_LEN
    """,
}

EXCUSED_ENVIRONMENT: Final = {name: reason for reason, names in _VARIABLES_BY_REASON.items() for name in names.split()}
"""Name of a variable -> why it is harmless."""

ALSO_COUNTED: Final = (
    "AITER_BF16_FP8_MOE_BOUND",
    "FLA_TRIL_PRECISION",
    "FLA_USE_FAST_OPS",
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "USE_DEFAULT_FLA_NORM",
    "XHS_VIDEO_JPEG_QUALITY",
)
"""Variables outside ``vllm.envs`` that change the precision of a computation, or the pixels that it gets."""
