"""What of vLLM's configuration was looked at and counts: the other side of ``nixl_offload.identity.excused``.

A field of a new vLLM that stands in neither list fails ``test_identity_fields.py``. It counts meanwhile; somebody has
to say whether it must.
"""

from __future__ import annotations

from typing import Final

COUNTED_FIELDS: Final = {
    "VllmConfig": """
        additional_config attention_config cache_config compilation_config device_config diffusion_config
        engram_config kernel_config load_config lora_config mamba_config model_config parallel_config
        performance_mode scheduler_config speculative_config
    """,
    "ModelConfig": """
        allow_deprecated_quantization code_revision config_format convert disable_sliding_window dtype generation_config
        hf_config hf_text_config io_processor_plugin is_submodel_config max_model_len model_class_overrides model_impl
        model_weights multimodal_config override_generation_config pooler_config quantization quantization_config runner
        spec_target_max_model_len tokenizer_mode trust_remote_code word_embeddings_untied_by_checkpoint
    """,
    "MultiModalConfig": """
        allow_missing_mm_embeddings enable_mm_embeds language_model_only media_io_kwargs mm_device_do_normalize
        mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path mm_encoder_only
        mm_encoder_tp_mode mm_hasher_algorithm mm_processor_kwargs video_pruning_method video_pruning_rate
    """,
    "PoolerConfig": """
        dimensions enable_chunked_processing enable_flash_late_interaction logit_mean logit_sigma max_embed_len
        pooling_type returned_token_ids seq_pooling_type step_tag_id task tok_pooling_type use_activation
    """,
    "QuantizationConfigArgs": """
        ignore linear moe targets
    """,
    "QuantSpec": """
        activation weight
    """,
    "CacheConfig": """
        block_size cache_dtype effective_attention_block_size
        enable_mamba_shared_prefix_checkpoint enable_prefix_caching is_attention_free
        kv_cache_dtype_skip_layers kv_cache_layout kv_sharing_fast_prefill mamba_block_size mamba_cache_dtype
        mamba_cache_mode mamba_page_size_padded mamba_ssm_cache_dtype prefix_caching_hash_algo prefix_match_unit
        replayssm_buffer_len skip_page_size_padded sliding_window swa_bounded_replay use_kda_recoverssm
        use_replayssm
    """,
    "ParallelConfig": """
        _allow_auto_resolve_cp_interleave_size all2all_backend cp_kv_cache_interleave_size dcp_comm_backend
        dcp_kv_cache_interleave_size dcp_q_replicate enable_expert_parallel enable_hc_sp
        expert_placement_strategy is_moe_model worker_cls worker_extension_cls
    """,
    "SchedulerConfig": """
        disable_chunked_mm_input disable_hybrid_kv_cache_manager is_multimodal_model runner_type scheduler_cls
    """,
    "DeviceConfig": """
        device device_type
    """,
    "LoadConfig": """
        device ignore_patterns load_format model_loader_extra_config pt_load_map_location
    """,
    "AttentionConfig": """
        backend_per_kind disable_flashinfer_q_quantization flash_attn_max_num_splits_for_cuda_graph
        flash_attn_version flex_attn_block_m flex_attn_block_n flex_attn_kv_block_size flex_attn_q_block_size
        hisparse_config indexer_kv_dtype indexer_sparse_logits indexer_tp_shard_min_rows minimax_m3_indexer_cp
        minimax_m3_msa_decode_backend mla_prefill_backend sparse_mla_force_mqa
        sparse_mla_prefill_workspace_factor tokenspeed_mla_min_split_kv tq_max_kv_splits_for_cuda_graph
        trtllm_ragged_backend use_non_causal use_prefill_query_quantization use_trtllm_attention
    """,
    "HiSparseConfig": """
        device_buffer_size eager_host_mirror
    """,
    "EngramConfig": """
        cpu_offload dp_shared_memory embedding_across_dp use_thp
    """,
    "MambaConfig": """
        backend enable_stochastic_rounding ssu_algorithm stochastic_rounding_philox_rounds
    """,
    "KernelConfig": """
        linear_backend linear_backend_per_quant moe_backend monokernel sparse_indexer_topk_backend
    """,
    "LoRAConfig": """
        default_mm_loras enable_mixed_moe_lora_format enable_moe_shared_loras enable_tower_connector_lora
        fully_sharded_loras lora_dtype max_lora_cls_labels max_lora_rank specialize_active_lora target_modules
    """,
    "SpeculativeConfig": """
        attention_backend code_revision disable_eagle_block_drop disable_lookahead_block_hashes
        disable_padded_drafter_batch draft_lm_head_quantization draft_load_config draft_model_config
        draft_parallel_config draft_tensor_parallel_size dspark_draft_topk enable_adaptive_verification
        index_share_for_mtp_iteration kv_cache_dtype max_model_len method moe_backend num_speculative_tokens
        num_speculative_tokens_per_batch_size parallel_drafting prompt_lookup_max prompt_lookup_min quantization
        suffix_decoding_max_cached_requests suffix_decoding_max_spec_factor suffix_decoding_max_tree_depth
        suffix_decoding_min_token_prob tensor_parallel_size use_heterogeneous_vocab use_local_argmax_reduction
        xpress_topc
    """,
    "DiffusionConfig": """
        canvas_length max_denoising_steps
    """,
}
"""By class: fields that were looked at, and stay in the namespace."""

COUNTED_VARIABLES: Final = """
    VLLM_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE
    VLLM_ALLREDUCE_USE_FLASHINFER VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC VLLM_ALLREDUCE_USE_SYMM_MEM
    VLLM_B12X_MOE_FP4_FORCE_A16 VLLM_BATCH_INVARIANT VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER
    VLLM_COHERE2_ATTN_MOE_DUAL_STREAM_TOKEN_THRESHOLD VLLM_CPU_ATTN_SPLIT_KV VLLM_CPU_INT4_W4A8
    VLLM_DBO_COMM_SMS VLLM_DCP_Q_REPLICATE VLLM_DEEPEPLL_NVFP4_DISPATCH VLLM_DEEPEP_BUFFER_SIZE_MB
    VLLM_DEEPEP_HIGH_THROUGHPUT_FORCE_INTRA_NODE VLLM_DEEPEP_LOW_LATENCY_USE_MNNVL
    VLLM_DEEPEP_V2_ALLOW_HYBRID_MODE VLLM_DEEPEP_V2_ALLOW_MULTIPLE_REDUCTION VLLM_DEEPEP_V2_PREFER_OVERLAP
    VLLM_DISABLED_KERNELS VLLM_DISABLE_DSV4_MEGAMOE_SHARED_EXPERT_FUSION VLLM_DISABLE_SHARED_EXPERTS_STREAM
    VLLM_ENABLE_FLA_PACKED_RECURRENT_DECODE VLLM_ENABLE_GEMM_RS VLLM_ENABLE_HPC_OPS
    VLLM_FLASHINFER_ALLREDUCE_BACKEND VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE
    VLLM_FLOAT32_MATMUL_PRECISION VLLM_GDN_DECODE_KERNEL VLLM_HUMMING_INPUT_QUANT_CONFIG
    VLLM_HUMMING_MOE_GEMM_TYPE VLLM_HUMMING_ONLINE_QUANT_CONFIG VLLM_HUMMING_USE_F16_ACCUM
    VLLM_KIMI_K3_AUX_ATTN_RES_STREAM VLLM_KIMI_K3_GEMM_AR VLLM_KIMI_K3_SHARD_SP_SHARED_EXPERT
    VLLM_KV_CACHE_LAYOUT VLLM_LORA_DISABLE_PDL VLLM_LORA_ENABLE_DUAL_STREAM VLLM_MARLIN_INPUT_DTYPE
    VLLM_MARLIN_USE_ATOMIC_ADD VLLM_MAX_IMAGE_PIXELS VLLM_MAX_TOKENS_PER_EXPERT_FP4_MOE VLLM_MEDIA_CONNECTOR
    VLLM_MLA_DISABLE VLLM_MODEL_REDIRECT_PATH VLLM_MOE_ROUTING_SIMULATION_STRATEGY VLLM_MOE_SKIP_PADDING
    VLLM_MOE_USE_DEEP_GEMM VLLM_MULTI_STREAM_GEMM_TOKEN_THRESHOLD VLLM_MXFP4_EMULATION_DEQUANT_AT_LOAD
    VLLM_MXFP8_EMULATION_DEQUANT_AT_LOAD VLLM_PLUGINS VLLM_PP_LAYER_PARTITION VLLM_RANDOMIZE_DP_DUMMY_INPUTS
    VLLM_REPLICATE_EMBED VLLM_ROCM_AITER_MLA_ASM_PADDING
    VLLM_ROCM_AITER_MOE_DISPATCH_POLICY VLLM_ROCM_FP8_MFMA_PAGE_ATTN
    VLLM_ROCM_FP8_PADDING VLLM_ROCM_MOE_PADDING VLLM_ROCM_MUSE_MOE_ONLINE_QUANT
    VLLM_ROCM_MUSE_MOE_REDUCE_DTYPE VLLM_ROCM_QUICK_REDUCE_CAST_BF16_TO_FP16
    VLLM_ROCM_QUICK_REDUCE_MAX_SIZE_BYTES_MB VLLM_ROCM_QUICK_REDUCE_MIN_SIZE_BYTES_MB
    VLLM_ROCM_QUICK_REDUCE_QUANTIZATION VLLM_ROCM_QUICK_REDUCE_QUANTIZATION_MIN_SIZE_KB
    VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT VLLM_ROCM_USE_AITER VLLM_ROCM_USE_AITER_CUSTOM_AR
    VLLM_ROCM_USE_AITER_FP4BMM VLLM_ROCM_USE_AITER_FP8BMM
    VLLM_ROCM_USE_AITER_FUSION_SHARED_EXPERTS VLLM_ROCM_USE_AITER_LINEAR VLLM_ROCM_USE_AITER_LINEAR_HIPBMM
    VLLM_ROCM_USE_AITER_MHA VLLM_ROCM_USE_AITER_MLA VLLM_ROCM_USE_AITER_MOE VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4
    VLLM_ROCM_USE_AITER_MOE_SITUV2 VLLM_ROCM_USE_AITER_RMSNORM VLLM_ROCM_USE_AITER_TRITON_GEMM
    VLLM_ROCM_USE_AITER_TRITON_ROPE VLLM_ROCM_USE_AITER_TRITON_SPARSE_MLA VLLM_ROCM_USE_AITER_UNIFIED_ATTENTION
    VLLM_ROCM_USE_SKINNY_GEMM VLLM_SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD VLLM_SPARSE_INDEXER_MAX_LOGITS_MB
    VLLM_SSM_CONV_STATE_LAYOUT VLLM_STEP5_SHARD_SP_SHARED_EXPERT VLLM_TEST_FORCE_LOAD_FORMAT
    VLLM_TPU_USING_PATHWAYS VLLM_TRITON_USE_TD VLLM_USE_DEEP_GEMM VLLM_USE_DEEP_GEMM_E8M0
    VLLM_USE_DEEP_GEMM_TMA_ALIGNED_SCALES VLLM_USE_DIRECT_DCP_A2A VLLM_USE_DIRECT_DCP_KV_GATHER
    VLLM_USE_DIRECT_DCP_Q_GATHER VLLM_USE_FLASHINFER_MOE_INT4 VLLM_USE_FUSED_MOE_GROUPED_TOPK
    VLLM_USE_HW_AGNOSTIC VLLM_USE_MODELSCOPE VLLM_USE_NCCL_SYMM_MEM VLLM_USE_OINK_OPS VLLM_USE_TRITON_AWQ
    VLLM_USE_V2_MODEL_RUNNER VLLM_VIDEO_LOADER_BACKEND VLLM_XLA_USE_SPMD VLLM_XPU_FORCE_N_CONTIG_WEIGHT
    VLLM_XPU_INC_WNA16_BACKEND VLLM_XPU_PP_MICROBATCH VLLM_ZENTORCH_WEIGHT_PREPACK
"""
"""Environment variables that were looked at, and stay in the namespace."""
