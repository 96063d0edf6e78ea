"""What no training step can be: every line of the table refuses a case, and what is next to it is served."""

import re
from dataclasses import dataclass, replace

import pytest

from cs336_systems.case import TrainingCase
from cs336_systems.config import Lora
from cs336_systems.ranks import Parallel
from cs336_systems.refusals import REFUSALS, refusal
from tests.training.shared import Shared

PLAIN = TrainingCase(size="tiny", context_length=64)
FUSED = TrainingCase("cuda", "tiny", 4, 64, "bf16", "flash", optimizer="fused", kernels="fused", keep="input")
FP8 = replace(FUSED, matmul_dtype="e4m3")
GRAPH = TrainingCase("cuda", "tiny", 4, 64, cuda_graph="on", optimizer="fused")


CONTEXT_BY_TORCH = Parallel("bucketed", context=2, context_order="torch")


SCATTERED = Shared("cuda", "tiny", 4, 64, optimizer="fused", how=Parallel(optimizer_state="scattered"))
EARLY = Shared("cuda", "tiny", 4, 64, optimizer="fused", how=Parallel("fsdp", update="under-backward"))
SHARING = Shared("cuda", "tiny", 4, 64, optimizer="fused", keep="all", how=Parallel("bucketed", tensor=2))
SHARING_FP8 = replace(SHARING, dtype="bf16", matmul_dtype="e4m3", optimizer="torch-fused")
BY_TORCH = Parallel(tensor=2, tensor_by="torch")
STAGES_BY_TORCH = Parallel(pipeline=2, pipeline_by="torch")
STAGED = replace(SHARING, keep="autograd", optimizer="torch-fused", accumulate=4, how=STAGES_BY_TORCH)


@dataclass(frozen=True)
class AttentionAlone(Shared):
    """A case of which one block's attention runs."""

    @property
    def attention_alone(self) -> bool:
        return True


@dataclass(frozen=True)
class Adapted(Shared):
    """A case that trains adapters."""

    lora: Lora | None = None


ADAPTED = Adapted("cpu", "tiny", 4, 64, keep="input", lora=Lora(4, 8.0))
ALONE = AttentionAlone("cuda", "tiny", 4, 64, "bf16", "sdpa-cudnn", how=CONTEXT_BY_TORCH)

BY_ROW = {"dtype": "bf16", "matmul_dtype": "e4m3", "scaling": "row"}

REFUSED = [
    (replace(FP8, kernels="reference", keep="autograd"), "e4m3 with keep autograd"),
    (replace(FP8, fp8_skip_first=-1), "--fp8-skip-first must not be negative, got -1"),
    (replace(FP8, fp8_skip_first=2), "quantizes none of 2 blocks: the first 2 and the last 0"),
    (replace(FUSED, keep="autograd"), "kernels fused with keep autograd"),
    (replace(FUSED, device="cpu"), "need device cuda, got cpu"),
    (replace(FUSED, attention="reference"), "attention reference: .* which flash, hopper have"),
    (
        replace(PLAIN, keep="all", attention="sdpa-flash"),
        "attention sdpa-flash: .* which reference, flash, hopper have",
    ),
    (replace(PLAIN, matmul_kernels="measured"), "measured needs device cuda and kernels fused"),
    (replace(FUSED, matmul_kernels="measured", device="cuda", **BY_ROW), "scaling tensor .* got row and e4m3"),
    (replace(SHARING, kernels="fused", attention="flash", matmul_kernels="measured"), "their own, got tensor 2"),
    (replace(ADAPTED, optimizer="muon"), "muon with LoRA of rank 4"),
    (replace(ADAPTED, keep="autograd"), "LoRA of rank 4 with keep autograd"),
    (replace(ADAPTED, how=Parallel("bucketed", tensor=2)), "LoRA of rank 4 with tensor 2, pipeline 1"),
    (replace(PLAIN, keep="all", dtype="autocast-bf16"), "keep all with dtype autocast-bf16"),
    (replace(PLAIN, keep="all", compile="on"), "keep all with compile on"),
    (replace(PLAIN, keep="all", checkpoint="every-2"), "keep all with checkpoint every-2"),
    (replace(FUSED, dtype="fp32", master="fp32"), "for dtype bf16 and optimizer fused, got fp32 and fused"),
    (replace(FUSED, offload="master"), "offload master needs master weights"),
    (replace(FUSED, kernels="reference", keep="autograd", offload="residual"), "offload residual needs blocks"),
    (replace(FUSED, optimizer="torch-fused", offload="m"), "offload m needs optimizer fused, got torch-fused"),
    (replace(SCATTERED, offload="gradients"), "offload gradients is for one rank"),
    (replace(EARLY, offload="m-v"), "offload m-v with update under-backward"),
    (replace(FUSED, cuda_graph="on", offload="residual"), "offload residual copies beside the step"),
    (replace(GRAPH, device="cpu", optimizer="torch-fused"), "cuda_graph on needs device cuda, got cpu"),
    (replace(SCATTERED, cuda_graph="on"), "cuda_graph on is for one rank"),
    (replace(GRAPH, optimizer="reference"), "cuda_graph on with optimizer reference"),
    (replace(GRAPH, optimizer="muon"), "cuda_graph on with optimizer muon"),
    (replace(SHARING, optimizer="muon"), "muon needs whole matrices, which tensor 2 cuts"),
    (replace(EARLY, optimizer="muon"), "muon needs whole matrices, which update under-backward cuts"),
    (replace(EARLY, optimizer="muon", how=Parallel("bucketed", optimizer_state="torch-zero")), "muon .* torch-zero"),
    (replace(PLAIN, compile="whole-model", checkpoint="full"), "whole-model leaves no boundaries .* checkpoint full"),
    (replace(EARLY, how=Parallel("bucketed", update="under-backward")), "wrapper fsdp, got bucketed"),
    (
        replace(EARLY, keep="autograd", how=Parallel(tensor=2)),
        "pipeline 1.* need keep input, attention, products or all, got",
    ),
    (replace(SHARING_FP8, scaling="block"), "scaling block with tensor 2"),
    (replace(SHARING_FP8, batch_size=1, context_length=48), "of each of tensor 2 x context 1 .* not tokens 24"),
    (replace(SHARING, how=Parallel(context=2)), "context 2 with wrapper none"),
    (replace(SHARING, how=Parallel("bucketed", replicas=2)), "replicas 2 .* wrapper bucketed"),
    (replace(SHARING, how=Parallel("bucketed", context=2, max_ctas=8)), "max_ctas 8 .* context 2"),
    (replace(SHARING, how=Parallel("fsdp2", pipeline=2)), "pipeline 2 with wrapper fsdp2"),
    (replace(SHARING, how=Parallel("fsdp", gather_by="copies", pipeline=2)), "not with gather_by copies"),
    (replace(SHARING, how=Parallel("fsdp", compute_dtype="bf16", pipeline=2)), "compute_dtype bf16 or"),
    (replace(SHARING, how=Parallel(optimizer_state="scattered-gradients", pipeline=2)), "use stage 1, or 3"),
    (replace(SHARING, how=Parallel(pipeline=2), offload="gradients"), "gradients is for one rank"),
    (
        replace(SHARING, how=Parallel(pipeline=2), kernels="fused", attention="flash", offload="residual"),
        "pipeline 2 with offload residual",
    ),
    (replace(SHARING, how=Parallel(pipeline=3)), "2 blocks do not make 3 parts"),
    (replace(SHARING, how=Parallel(pipeline=2, pipeline_schedule="zbv")), "4 parts of a pipeline, 2 on each"),
    (replace(SHARING, how=Parallel(pipeline=2, pipeline_schedule="dualpipev")), "needs 4 micro-batches for 2 stages"),
    (replace(SHARING, how=Parallel(pipeline=2, pipeline_schedule="interleaved")), "got 1 micro-batches over 2"),
    (replace(SHARING, cuda_graph="on"), "cuda_graph on is for one rank"),
    (
        replace(SHARING, kernels="fused", attention="flash", dtype="bf16", offload="gradients"),
        "gradients is for one rank",
    ),
    (replace(SHARING, how=BY_TORCH), "tensor_by torch divides .* optimizer fused"),
    (replace(SHARING, size="qwen3-0.6b", optimizer="torch-fused", keep="autograd", how=BY_TORCH), "not for qwen3-0.6b"),
    (replace(SHARING, how=STAGES_BY_TORCH), "pipeline_by torch runs .* keep all"),
    (replace(STAGED, how=replace(STAGES_BY_TORCH, wrapper="bucketed")), "pipeline_by torch runs .* wrapper bucketed"),
    (replace(STAGED, dtype="autocast-bf16"), "pipeline_by torch runs .* dtype autocast-bf16"),
    (replace(STAGED, size="qwen3-0.6b"), "without tied embeddings, not for qwen3-0.6b"),
    (
        replace(STAGED, compile="on", how=replace(STAGES_BY_TORCH, pipeline_schedule="zb-h1")),
        "under zb-h1, .* loss or off, got on",
    ),
    (replace(STAGED, accumulate=1), "each of 2 stages under 1f1b, got 1"),
    (
        replace(SHARING, keep="autograd", attention="sdpa-cudnn", how=CONTEXT_BY_TORCH),
        "context_order torch .* not a whole step",
    ),
    (replace(ALONE, attention="sdpa-efficient"), "sdpa-cudnn or sdpa-flash .* got autograd, sdpa-efficient and cuda"),
    (replace(ALONE, device="cpu"), "device cuda, got autograd, sdpa-cudnn and cpu"),
    (replace(ALONE, attention="flash", keep="products"), "needs keep autograd, .* got products, flash"),
    (replace(ALONE, how=Parallel("bucketed", context=2)), "context 2, .* need keep"),
    (replace(SHARING, how=Parallel(tensor=3)), "tensor 3 does not divide"),
    (replace(SHARING, how=Parallel("bucketed", context=3)), "6 equal parts, got 64 tokens"),
    (replace(FP8, context_length=60), "sizes that 16 divides, not context 60"),
]


def test_every_line_of_the_table_refuses_something_with_its_values():
    for case, values in REFUSED:
        assert re.search(values, refusal(case) or "served"), values
    first = [next((i for i, (refused, _) in enumerate(REFUSALS) if refused(case)), None) for case, _ in REFUSED]
    assert set(first) - {None} == set(range(len(REFUSALS)))


def test_what_is_next_to_it_is_served():
    on_cpu = {"kernels": "reference", "attention": "reference", "optimizer": "reference", "device": "cpu"}
    for case in (
        *(PLAIN, FUSED, FP8, GRAPH, SCATTERED, EARLY, SHARING),
        *(ALONE, replace(ALONE, attention="sdpa-flash", how=replace(CONTEXT_BY_TORCH, context_order="torch-gathered"))),
        *(PLAIN, FUSED, FP8, GRAPH, SCATTERED, EARLY, SHARING, SHARING_FP8),
        *(ADAPTED, replace(ADAPTED, how=Parallel("bucketed", context=2))),
        replace(FP8, keep="1xall+products", **on_cpu),
        replace(FUSED, master="fp32", offload="master-m-v-gradients-residual"),
        replace(SCATTERED, offload="m-v"),
        replace(EARLY, keep="input", offload="residual"),
        replace(PLAIN, dtype="autocast-bf16", compile="on", checkpoint="every-2"),
        replace(FUSED, optimizer="muon"),
        replace(SCATTERED, optimizer="muon"),
        replace(SCATTERED, optimizer="muon", how=Parallel("fsdp")),
    ):
        assert refusal(case) is None


def test_an_unknown_name_is_told_with_the_nearest():
    for name, value, near in (
        *(("keep", "produkts", "'products'"), ("keep", "autogard", "'autograd'"), ("keep", "all-nrom", "'norm'")),
        *(("kernels", "fuse", "'fused'"), ("attention", "flush", "'flash'"), ("scaling", "rows", "'row'")),
        *(("master", "fp23", "'fp32'"), ("cuda_graph", "yes", "off, on"), ("offload", "m-gradient", "'gradients'")),
        ("checkpoint", "fulll", "'full'"),
    ):
        with pytest.raises(ValueError, match=near):
            refusal(replace(PLAIN, **{name: value}))
