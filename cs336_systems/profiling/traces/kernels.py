"""The class of a kernel, from its name: the classes by which time is added up, and names that fit on a page.

The names are those of cuBLAS, cuDNN, CUTLASS, NCCL, torch's own kernels, Triton and Inductor, and of torch's operators
on a CPU. The first pattern that matches decides, so fused attention (whose kernels name CUTLASS) comes before matmul.
A name that no pattern knows is ``other``: the digest shows how much time that is. Inductor names a fused kernel after
every operation in it, so only the kind in front counts: template (tem), reduction (red, per) or pointwise (poi).
"""

import functools
import re

ATTENTION, MATMUL, COMMUNICATION = "fused attention", "matmul", "communication"
SOFTMAX, REDUCTION, ELEMENTWISE = "softmax", "reduction", "elementwise"
OPTIMIZER, COPY, OTHER = "optimizer", "copy or cast", "other"
QUANTIZATION = "quantization"

PEER_COPY = "memcpy PtoP"
"""The name of a copy from one GPU to another."""
CLASSES = (MATMUL, ATTENTION, SOFTMAX, REDUCTION, ELEMENTWISE, QUANTIZATION, COPY, OPTIMIZER, COMMUNICATION, OTHER)
"""The classes in the order in which tables and figures show them."""

_PATTERNS = (
    # Also where SwiGLU's gradient is computed as it is quantized.
    (QUANTIZATION, r"^\w*(quantize|absmax|transpose_bytes)\w*_kernel$"),
    (ATTENTION, r"^triton_tem_\w*(flex|attention)"),
    (MATMUL, r"^triton_tem_"),
    (SOFTMAX, r"^triton_(red|per)_\w*softmax"),
    (REDUCTION, r"^triton_(red|per)_"),
    (ELEMENTWISE, r"^triton_poi_"),
    (COMMUNICATION, rf"{PEER_COPY}|nccl|gloo|c10d::|all_?reduce|all_?gather|reduce_?scatter"),
    (ATTENTION, r"flash|fmha|sdpa|scaled_dot_product|attention|\battn_(fwd|bwd)|flex_|^hopper_"),
    (
        MATMUL,
        r"gemm|gemv|^product_kernel|cutlass|cublas|nvjet|xmma|splitk|aten::(add|b|badd)?mm\b|aten::(matmul|linear|dot)",
    ),
    (SOFTMAX, r"softmax|^cross_entropy_rows"),
    (COPY, r"multi_tensor_apply.*\bCopy<"),  # several tensors at once, as into what FSDP2 sends
    (OPTIMIZER, r"multi_tensor_apply|fused_?adam|_foreach_|^(advance|update)_kernel$"),
    (COPY, r"^mem(cpy|set)$|copy|CatArray|aten::(cat|clone|contiguous|_to_copy|zero_|fill_)|FillFunctor"),
    (
        REDUCTION,
        r"reduce|logsumexp|aten::(sum|mean|amax|max|norm|rsqrt)\b|norm_kernel|^rms_norm_|^sum_rows|^column_sums",
    ),
    (
        ELEMENTWISE,
        r"elementwise|^(swiglu|rotary)_|index|gather|scatter|embedding|tri[ul]|aten::(mul|add|sub|div|pow|exp|log|sqrt|silu"
        r"|sigmoid|neg|where|masked_fill|square|lerp|addcmul|addcdiv|rsqrt|random|normal|uniform|threshold)",
    ),
    (OTHER, r""),
)

_DETAIL = re.compile(r"\bcutlass_\w+|\b\w+Functor\w*|\b\w+_kernel\w*|\b\w+Ops\b|\b(?:sum|prod)_functor\b|\bReduce\w+\b")

_TOLD_BY_ALL = frozenset(
    ("gpu_kernel_impl", "gpu_kernel_impl_nocast", "BinaryFunctor", "AUnaryFunctor", "BUnaryFunctor", "ReduceOp")
)
"""Template arguments that wrap the one of interest."""


@functools.cache
def kernel_class(name: str) -> str:
    """One of ``CLASSES``."""
    return next(label for label, pattern in _PATTERNS if re.search(pattern, name, re.IGNORECASE))


@functools.cache
def collective_name(name: str) -> str:
    """The common name of the collective that an operation of class ``COMMUNICATION`` is."""
    found = re.search(r"(all|reduce|broad)_?(reduce|gather|scatter|cast|to_?all)", name, re.IGNORECASE)
    if found is None:
        return "collective"
    return "broadcast" if found[1].lower() == "broad" else f"{found[1]}-{found[2]}".lower()


@functools.cache
def short_name(name: str, width: int = 72) -> str:
    """A kernel's name without return type, namespaces and arguments; of its template arguments, the one that tells."""
    bare = re.sub(r"(\(anonymous namespace\)|<unnamed>)::", "", re.sub(r"^(void|std::\w+|int|float|double) ", "", name))
    base = bare if "::" in bare and "(" not in bare and "<" not in bare else re.split(r"[<(]", bare)[0].split("::")[-1]
    telling = (word for word in _DETAIL.findall(bare.partition("<")[2]) if word not in _TOLD_BY_ALL)
    detail = next((word for word in telling if word != base), None)
    short = f"{base}<{detail}>" if detail else base
    return short if len(short) <= width else f"{short[: width - 3]}..."
