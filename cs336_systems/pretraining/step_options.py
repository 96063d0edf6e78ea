"""The options of ``train.py`` that describe a training step and how ranks share it. Imports no torch."""

from dataclasses import dataclass
from typing import Any, get_args

from cs336_systems.case import TrainingCase
from cs336_systems.config import ATTENTIONS, FASTEST, Lora
from cs336_systems.declared import like, option
from cs336_systems.ranks import CONTEXT_ORDER_HELP, CONTEXT_ORDERS, SHARED_BATCH, GatherBy, Parallel, PipelineBy


@dataclass(frozen=True)
class TrainerCase(TrainingCase):
    """The training step of a run, and how ranks share it."""

    dtype: str = like(TrainingCase, "dtype", asked="bf16")
    attention: str = like(
        TrainingCase,
        "attention",
        asked=FASTEST,
        values=(FASTEST, *ATTENTIONS),
        help="Attention: reference holds all scores in memory (reference-compiled: under torch.compile); tiled, flash "
        "and hopper are this suite's FlashAttention-2 in PyTorch, in Triton, and for H100 and H200; sdpa-... and flex "
        "are torch's. fastest is hopper where it runs, but flash with --deterministic, which makes hopper slower; on "
        "other GPUs flash, on a CPU reference.",
    )
    compile: str = like(
        TrainingCase,
        "compile",
        values=("off", "on"),
        help="With --keep autograd, on compiles each block by torch.compile.",
    )
    checkpoint: str = "none"
    optimizer: str = like(
        TrainingCase,
        "optimizer",
        asked="fused",
        values=("torch-fused", "fused", "muon"),
        help="AdamW: torch-fused is torch's fused kernel; fused is this suite's kernel, which rounds bf16 "
        "stochastically and needs a CUDA device. muon is Muon for the matrices of blocks, with the same learning rate, "
        "and AdamW for all else.",
    )
    cuda_graph: str = like(
        TrainingCase,
        "cuda_graph",
        help="on captures the step (with --optimizer torch-fused all but the optimizer) as a CUDA graph and replays "
        "it; needs --device cuda and one rank, or tensor ranks by collectives.",
    )
    kernels: str = like(TrainingCase, "kernels", asked="fused")
    offload: str = "none"
    moments: str = option(
        "same",
        "Dtype of AdamW's moments: same as the parameters; another dtype needs --optimizer fused.",
        values=("same", "fp32", "bf16"),
    )
    z_loss: float = option(
        0.0,
        "Coefficient of the squared log-sum-exp of the logits, which is added to the training loss; not with --keep "
        "autograd.",
        sign="not negative",
    )
    deterministic: bool = option(
        False,
        "Make runs have the same bits, also under all memory limits that put the same chunks into a round. Only "
        "attention on an H100 or H200 changes, and takes longer: it is flash, or hopper with another backward.",
    )
    zero: int = option(
        0,
        "What is sharded among ranks: 0, nothing (DDP); 1, the optimizer's state; 2, also gradients; 3, also "
        "parameters (FSDP). One rank shards nothing, whatever is given.",
        values=(0, 1, 2, 3),
    )
    gather_by: GatherBy = like(
        Parallel, "gather_by", help="How --zero 3 gathers weights: in collectives, or by copies within one host."
    )
    replicas: int = like(
        Parallel,
        "replicas",
        help="Copies of the model. Without --agree, of FSDP's shards (hybrid sharding): weights are divided over the "
        "ranks of each, and gradients averaged over all. With --agree, training worlds that may die.",
    )
    tensor: int = like(Parallel, "tensor")
    tensor_by: GatherBy = like(
        *(Parallel, "tensor_by"),
        values=get_args(GatherBy),
        help="How tensor ranks exchange rows: collectives, between matrix products; copies, from each other's memory "
        "while products run, which needs ranks on one host (few rows still go by collectives; CPUs send messages).",
    )
    context: int = like(Parallel, "context")
    context_order: str = like(Parallel, "context_order", values=CONTEXT_ORDERS, help=CONTEXT_ORDER_HELP)
    pipeline: int = like(Parallel, "pipeline")
    pipeline_schedule: str = like(Parallel, "pipeline_schedule")
    pipeline_chunks: int = like(Parallel, "pipeline_chunks")
    pipeline_by: PipelineBy = like(
        *(Parallel, "pipeline_by"),
        plain="auto",
        values=("auto", "messages", "copies"),
        help="How activations go from stage to stage: messages, of NCCL or gloo; copies, by copy engines of GPUs on "
        "one host (CPUs send messages); auto, copies where GPUs reach each other's memory, else messages.",
    )
    world_size: int = 1
    lora: Lora | None = None

    @property
    def moment_bytes(self) -> int:
        """Bytes of one element of one of AdamW's moments."""
        return {"same": self.precision.parameter_bytes, "fp32": 4, "bf16": 2}[self.moments]

    @property
    def parallel(self) -> Parallel:
        mesh: dict[str, Any] = {name: getattr(self, name) for name in (*SHARED_BATCH, "pipeline_by")}
        if self.world_size <= self.tensor * self.pipeline:
            return Parallel(**mesh)  # one rank has nobody to shard with
        if self.zero == 3:
            return Parallel("fsdp", gather_by=self.gather_by, replicas=self.replicas, **mesh)
        if self.zero == 0:
            return Parallel("bucketed", **mesh)
        if self.zero == 1 and self.optimizer == "muon":  # Muon needs whole matrices
            return Parallel("bucketed", optimizer_state="owned", **mesh)
        return Parallel(optimizer_state="scattered" if self.zero == 1 else "scattered-gradients", **mesh)
