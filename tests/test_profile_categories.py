"""Real kernel names, and where they belong."""

from __future__ import annotations

import pytest

from dsv4doctor.profiling.categories import category_of, families_of, rows
from dsv4doctor.profiling.types import CATEGORIES

_MUL = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::BinaryFunctor<c10::BFloat16, "
    "c10::BFloat16, c10::BFloat16, at::native::binary_internal::MulFunctor<float> >, "
    "std::array<char*, 3ul> >(int, ...)"
)
_COPY = (
    "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<at::native::"
    "direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda()#3}::operator()() const::"
    "{lambda()#12}::operator()() const::{lambda(c10::BFloat16)#1}>(at::TensorIteratorBase&)>"
)
_INDEX = (
    "void at::native::index_elementwise_kernel<128, 4, at::native::gpu_index_kernel<at::native::"
    "index_kernel_impl<at::native::OpaqueType<8> >(at::TensorIteratorBase&)>"
)
_GROUPED = (
    "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cutlass::gemm::"
    "GroupProblemShape<cute::tuple<long, long, long> >, cutlass::gemm::collective::...>"
)
_DEEP = "void deep_gemm::sm90_fp8_gemm_1d2d_impl<(cute::UMMA::Major)0, 0u, 4096u, 7168u, "

NAMES = {
    "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "nccl",
    "void sglang::cross_device_reduce_1stage<__nv_bfloat16, 4>(sglang::RankData*)": "all-reduce",
    "void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<>": (
        "all-reduce"
    ),
    "void sglang::all_reduce_1shot_push_kernel<...>": "all-reduce",
    "_all_gather_kernel_inner": "gather-scatter",
    "void dpsk::ep::internode::dispatch<false, 8, true, 8>(...)": "expert-parallel",
    "void deep_gemm::sm90_fp8_paged_mqa_logits<64u, 128u>(unsigned int)": "mqa-logits",
    "_fp4_index_logits_paged_kernel": "fp4-indexer",
    "_finish_paged_indexer_topk_kernel": "fp4-indexer",
    "(anonymous namespace)::topk_transform_decode_kernel((anonymous namespace)::P)": (
        "indexer-top-k"
    ),
    "void sglang::topk_main_kernel<...>": "indexer-top-k",
    "(anonymous namespace)::topk_short_transform((anonymous namespace)::P)": "indexer-top-k",
    "(anonymous namespace)::topk_plan(unsigned int const*, unsigned int)": "indexer-top-k",
    "_logits_kernel": "indexer-of-dsv4doctor",
    "void sglang::fused_store_indexer_cache<__nv_bfloat16>(FusedStoreCacheParam)": "fp4-indexer",
    "_set_k_and_s_triton_kernel": "indexer-cache",
    "void sglang::device::marlin_moe::Marlin<1125899906909960l, 256>(int4 const*)": "moe-marlin",
    "_mxfp4_slot_gemv_kernel": "moe-triton-mxfp4",
    "_matmul_ogs_NNT_bf16xbf16xmxfp4_16x256x128x1_swiglu": "moe-triton-mxfp4",
    "fused_moe_kernel": "moe-triton",
    "bmm_E4m3_E2m1E4m3_Fp32_t128x8x512u2_s6_tma_dynBatch_sm100f": "moe-trtllm",
    "void moe::dev::finalize::finalizeKernel<...>": "moe-trtllm",
    "void tensorrt_llm::kernels::cutlass_kernels::expandInputRowsKernel<...>": "moe-cutlass",
    _GROUPED: "moe-cutlass",
    f"{_DEEP}8u, (deep_gemm::GemmType)1>(float*, int*)": "moe-deepgemm",
    "_silu_and_mul_post_quant_kernel": "moe-deepgemm",
    "void sglang::nvfp4_mtp_mma::fc1<...>": "moe-b12x",
    "_product_kernel": "moe-of-dsv4doctor",
    "void moe_align_block_size_kernel<int>(int const*, int*)": "moe-routing",
    "void moeSoftmax<float, 256>(float const*)": "moe-routing",
    "void moe_sum_reduce_kernel_general<c10::BFloat16>(c10::BFloat16 const*)": "moe-routing",
    "_moe_sum_reduce_kernel": "moe-routing",
    "moe_hash_topk_fused": "moe-routing",
    "route_radix_kernel": "moe-routing",
    "_sum_kernel": "moe-of-dsv4doctor",
    "void sm90::decode::sparse_fp8::flash_fwd_splitkv_mla_fp8_sparse_kernel<...>": "sparse-mla",
    "_tiled_sparse_decode_kernel": "sparse-mla",
    "decode_kernel": "mla-of-dsv4doctor",
    "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<...>": (
        "flash-attention"
    ),
    "_fwd_grouped_kernel_stage1": "flash-attention",
    "void sglang::flash_c4_decode_kernel<...>": "compressor",
    "plan_compress_decode_kernel": "compressor",
    "void fused_store_flashmla_cache<__nv_bfloat16>": "kv-cache",
    "_dequantize_k_cache_paged_kernel": "kv-cache",
    "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x64x8_stage3_warpsize2x2x1_ffma": "gemm-fp32",
    "void cutlass::Kernel2<cutlass_80_simt_sgemm_128x256_8x4_nt_align1::Params>": "gemm-fp32",
    "ampere_sgemm_128x64_tn": "gemm-fp32",
    "cutlass_tensorop_s1688tf32gemm_256x128_16x3_nn_align4": "gemm-fp32",
    "nvjet_tst_128x24_64x11_2x1_v_bz_TNT": "gemm-cublas",
    "void at::cuda::detail::prepare_grouped_gemm_data<cutlass::bfloat16_t, float>": "gemm-cublas",
    "cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_32x32_32x1_tn_align8": "gemm-cublas",
    "ampere_bf16_s1688gemm_bf16_128x128_ldg8_f2f_stages_32x1_nn": "gemm-cublas",
    f"{_DEEP}8u, (deep_gemm::GemmType)0>(float*, int*)": "gemm-deepgemm",
    "_w8a8_block_fp8_matmul": "gemm-triton",
    "_bmm_kernel": "gemm-of-dsv4doctor",
    "void sglang::device::marlin::Marlin<...>": "gemm-marlin",
    "_ZN7cutlass6KernelINS_4gemm6kernel23GemmWithEpilogueVisitorINS1_11threadblock": (
        "gemm-cutlass"
    ),
    "void flashinfer::norm::FusedAddRMSNormKernel<8u, __nv_bfloat16>": "norm",
    "void sglang::fused_norm_rope<...>": "norm",
    "apply_rotary_emb_triton_kernel": "rope",
    "_hc_split_sinkhorn_triton_kernel": "hyper-connections",
    "_vocab_parallel_embedding_kernel": "embedding",
    "hicache_transfer_per_layer": "cache-transfer",
    "void flashinfer::activation::act_and_mul_kernel<__nv_bfloat16>": "activation",
    "void at::native::sbtopk::gatherTopK<float, unsigned int, 1, false>": "sampling",
    "void at_cuda_detail::cub::DeviceScanInitKernel<at_cuda_detail::cub::ScanTileState<int> >": (
        "metadata"
    ),
    "_gather_rows_kernel": "sampling",
    "Memcpy HtoD (Pinned -> Device)": "copy",
    "Memset (Device)": "copy",
    _COPY: "copy",
    "void per_token_group_quant_8bit_kernel<__nv_bfloat16, c10::Float8_e4m3fn>": "cast",
    "cvt_fp8_e4m3_kernel": "cast",
    "void at::native::reduce_kernel<128, 4, at::native::ReduceOp<float> >": "reduction",
    _INDEX: "index",
    "void at_cuda_detail::cub::detail::select::DeviceSelectSweepKernel<cuda::equal_to<void> >": (
        "index"
    ),
    "void compute_cuda_kernel<long>(long const*, long const*, long*, long, long)": "index",
    _MUL: "elementwise",
    "triton_poi_fused_add_mul_0": "elementwise",
}


@pytest.mark.parametrize("name", NAMES)
def test_where_a_name_belongs(name: str) -> None:
    assert category_of(name).id == NAMES[name]


def test_every_row_has_a_name_that_reaches_it() -> None:
    assert {row.id for row in rows()} == set(NAMES.values())


def test_the_table_is_whole() -> None:
    assert len({row.id for row in rows()}) == len(rows())
    for row in rows():
        assert row.category in CATEGORIES
        assert row.category != "unknown"
        assert row.sources
        assert not row.pattern.search("")


def test_a_name_that_no_row_knows() -> None:
    assert category_of("my_own_kernel").category == "unknown"
    assert category_of("").category == "unknown"


@pytest.mark.parametrize(
    ("symbol", "families"),
    [
        ("flashinfer.fused_moe.trtllm_fp4_block_scale_routed_moe", {"trtllm"}),
        ("torch.ops.sglang.trtllm_fp8_block_scale_moe", {"trtllm"}),
        ("flashinfer.fused_moe.cutlass_fused_moe", {"cutlass"}),
        ("torch.ops.sglang.cutlass_fp4_group_mm", {"cutlass"}),
        ("jit:moe_wna16_marlin.moe_wna16_marlin_gemm", {"marlin"}),
        ("triton:sglang.srt.layers.moe.fused_moe_triton_kernels.fused_moe_kernel", {"triton"}),
        ("triton:dsv4doctor.kernels.grouped_gemm._product_kernel", {"dsv4doctor"}),
        ("something.else", set()),
    ],
)
def test_what_a_traced_symbol_runs(symbol: str, families: set[str]) -> None:
    assert families_of(symbol) == families
