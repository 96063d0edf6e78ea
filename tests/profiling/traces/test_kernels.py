"""Kernel names that were seen in traces, and what they are taken for."""

import pytest

from cs336_systems.profiling.traces.kernels import CLASSES, collective_name, kernel_class, short_name

AT = "void at::native::"
MUL = "at::native::BinaryFunctor<float, float, float, at::native::binary_internal::MulFunctor<float> >"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("void cutlass::Kernel2<cutlass_80_simt_sgemm_128x256_8x4_nt_align1>(Params)", "matmul"),
        ("nvjet_sm90_tst_128x256_64x4_1x2_h_bz_coopA_TNT", "matmul"),
        ("void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128>, cutlass::bfloat16_t>()", "fused attention"),
        ("void (anonymous namespace)::softmax_warp_forward<float, float, float, 9, false, false>(float*)", "softmax"),
        (f"{AT}reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float> > >()", "reduction"),
        ("triton_per_fused_add_mean_mul_pow_rsqrt_1", "reduction"),
        (f"{AT}vectorized_elementwise_kernel<4, {MUL}, std::array<char*, 3ul> >(int)", "elementwise"),
        ("triton_red_fused__softmax_masked_fill_2", "softmax"),
        ("triton_tem_fused_addmm_4", "matmul"),
        ("triton_tem_fused_flex_attention_backward_1", "fused attention"),
        (f"{AT}elementwise_kernel<128, 2, at::native::direct_copy_kernel_cuda(at::Iter&)>()", "copy or cast"),
        (f"{AT}<unnamed>::multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4> >()", "optimizer"),
        (f"{AT}multi_tensor_apply_kernel<UnaryOpFunctor<float, 2>, {AT}Copy<float, float> >()", "copy or cast"),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "communication"),
        ("hopper_backward_kernel", "fused attention"),
        ("cross_entropy_rows_kernel", "softmax"),
        ("rms_norm_backward_kernel", "reduction"),
        ("swiglu_forward_kernel", "elementwise"),
        ("product_kernel", "matmul"),
        ("update_kernel", "optimizer"),
        ("row_and_column_absmax_kernel", "quantization"),
        ("something_new", "other"),
    ],
)
def test_classes(name, expected):
    assert kernel_class(name) == expected
    assert expected in CLASSES


@pytest.mark.parametrize("expected", ["all-reduce", "all-gather", "reduce-scatter", "broadcast"])
def test_names_of_collectives(expected):
    camel = "".join(part.capitalize() for part in expected.split("-"))
    flat = expected.replace("-", "")
    spellings = [f"ncclDevKernel_{camel}_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", f"c10d::{flat}_"]
    for name in [*spellings, f"c10d::_{expected.replace('-', '_')}_base_"]:
        assert (kernel_class(name), collective_name(name)) == ("communication", expected)
    assert collective_name("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)") == "collective"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (f"{AT}vectorized_elementwise_kernel<4, {MUL}, std::array<char*, 3ul> >(int)", "<MulFunctor>"),
        ("void (anonymous namespace)::softmax_warp_forward<float, 9, false>(float*)", "softmax_warp_forward"),
        ("void cutlass::Kernel2<cutlass_80_simt_sgemm_128x256_8x4_nt_align1>(P)", "Kernel2<cutlass_80_simt_sgemm"),
        (
            f"{AT}reduce_kernel<512, at::native::ReduceOp<float, at::native::MeanOps<float> > >()",
            "reduce_kernel<MeanOps>",
        ),
        ("aten::_softmax", "aten::_softmax"),
    ],
)
def test_short_names_tell_what_matters(name, expected):
    assert expected in short_name(name)
    assert "at::native" not in short_name(name)
