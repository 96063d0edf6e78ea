"""Peak memory of a step whose blocks have their backward written out.

A block that says line by line what it makes and drops (``blocks/block.py``) can be predicted line by line: a ledger
goes through the step as the code does (``written_out_step.py``), adds every tensor where it is made and takes it off
where its last reference goes. What is alive, block by block:

    kept          what ``costs/kept.py`` says, of every block that backward has not reached; of the one that it is in,
                  what it has still to read
    gradients     of a whole block from the beginning of its backward on; q, k, v in one piece, gate and up in another
    quantized     of weights two copies of a byte; what products read in one or two, as they are made and dropped; the
                  few bytes of scales and of SwiGLU's slopes are left out
    head          the gradients of its input and its weight are made in forward beside one chunk of logits; backward
                  multiplies them where they lie
    accumulation  gradients of earlier micro-batches are there all the time, and a unit's new ones until they are added
    host          what ``costs/offload.py`` says: gradients for as long as they take to leave, the input of a block that
                  runs and of the one before it in backward, and what the optimizer fetches, three batches
    fully sharded whole weights of the block that runs and of the next ones, whole gradients of the block that runs and
                  of the one that is being reduced, and this rank's shards of all else

    written_out_peak(config, 1, 8192, PRECISIONS["bf16"], "step", keep="products", chunk=4096)

The operations are the fused kernels, whose buffers are counted: partial sums of norms' gains, attention's statistics
and its fp32 sums. Limits: eager execution, where states are sharded no accumulation and no gradients on the host, ranks
that divide all rows evenly (FSDP copies otherwise), and those of ``costs/memory.py``. Sizes are in bytes.
"""

from collections.abc import Collection, Mapping

from cs336_systems.config import MODES, OPTIMIZERS, WRITTEN_OUT_ATTENTIONS, ModelConfig, Precision, Recipe
from cs336_systems.costs.held_states import Accumulated, Leaving, Sharded, Whole
from cs336_systems.costs.kept import STORED, keep_of_blocks, kept_names
from cs336_systems.costs.ledger import Ledger
from cs336_systems.costs.memory import CUBLAS_WORKSPACE_BYTES, PeakMemory, cuda_block_bytes, rotary_bytes
from cs336_systems.costs.offload import BATCH_ELEMENTS, BATCHES_ON_DEVICE, IN_FLIGHT_BYTES
from cs336_systems.costs.written_out_sizes import Sizes
from cs336_systems.costs.written_out_step import Step


def written_out_peak(
    config: ModelConfig,
    batch_size: int,
    seq_len: int,
    precision: Precision,
    mode: str,
    *,
    keep: str,
    chunk: int,
    attention: str = "hopper",
    optimizer: str = "fused",
    recipe: Recipe = STORED,
    n_shards: int = 1,
    prefetch: int = 1,
    accumulates: bool = False,
    update: str = "after-backward",
    states: Mapping[str, int] | None = None,
    away: Collection[str] = (),
    device_type: str = "cuda",
    workspace_bytes: int = CUBLAS_WORKSPACE_BYTES,
) -> PeakMemory:
    """Predict the peak of allocated memory of one pass of ``mode``, per rank.

    Args:
        keep: a level and switches of ``costs/kept.py``, or those of each block.
        chunk: tokens whose logits the head has at a time.
        attention: flash or hopper.
        optimizer: ``reference`` holds one temporary as large as the largest parameter.
        recipe: of the blocks' products; weights that are quantized stay so; if sharded, they travel so where they have
            one scale each and ranks divide them evenly, as shapes of products let them, else are made at each use.
        n_shards: ranks of fully sharded data parallelism, blocks and head a unit each; 1 without. Its steps after the
            first are predicted, which know what comes next.
        prefetch: units whose weights are gathered ahead.
        accumulates: whether gradients of an earlier micro-batch are there.
        update: of fully sharded parameters, one of ``case.UPDATES``.
        states: of the optimizer, bytes per parameter by their names in ``costs.offload.STATES``; moments in the
            parameters' dtype if None.
        away: what is in host memory, names of ``costs.offload.OFFLOADS``.
        device_type: ``cuda`` counts the allocator's blocks and workspaces; ``cpu`` counts tensors.
        workspace_bytes: cuBLAS's, per thread that multiplies; ignored on the CPU.

    Raises:
        ValueError: no such mode, optimizer, attention, device type, level or switch, a precision with autocast, or
            accumulation of sharded gradients.
    """
    if n_shards > 1 and (accumulates or "gradients" in away):
        raise ValueError(f"gradients that accumulate over {n_shards} shards, or on the host, are not predicted")
    for name, value, known in (
        ("mode", mode, MODES),
        ("optimizer", optimizer, OPTIMIZERS),
        ("attention of fused kernels", attention, WRITTEN_OUT_ATTENTIONS[1:]),
        ("device type", device_type, ("cuda", "cpu")),
    ):
        if value not in known:
            raise ValueError(f"unknown {name} {value!r}: known are {', '.join(known)}")
    on_cuda = device_type == "cuda"
    sizes = Sizes(config, batch_size, seq_len, precision, attention, chunk, sorts=on_cuda and mode != "forward")
    quantized = [recipe.quantizes(i, config.n_layers) for i in range(config.n_layers)]
    ledger = Ledger(cuda_block_bytes if on_cuda else int)
    ledger.make("tables and workspaces", tables=rotary_bytes(config))
    if on_cuda:
        ledger.make(
            "tables and workspaces", **{f"workspace {i}": workspace_bytes for i in range(1 + (mode != "forward"))}
        )
    keeps = keep_of_blocks(keep, config.n_layers)
    kept = [frozenset(kept_names(each) if mode != "forward" else ()) for each in keeps]
    widths = {"m": sizes.width, "v": sizes.width} if states is None else states
    of = config, sizes.width, ledger
    if n_shards > 1:
        in_bytes = [each and recipe.scaling == "tensor" for each in quantized]
        held: Whole = Sharded(*of, n_shards, prefetch, update, [False, *in_bytes, False])
    elif "gradients" in away:
        held = Leaving(*of, accumulates=accumulates, in_flight_bytes=IN_FLIGHT_BYTES)
    else:
        held = Accumulated(*of) if accumulates else Whole(*of)
    held.make({name: width for name, width in widths.items() if name not in away} if mode == "step" else {})
    for i in (i for i in range(config.n_layers) if quantized[i] and n_shards == 1):
        for name, n in sizes.matrices.items():
            ledger.make("parameters", **{f"{i} quantized {name}": n, f"{i} quantized {name}, transposed": n})
    inputs_away = "residual" in away and mode != "forward"
    step = Step(
        sizes,
        ledger,
        held,
        kept,
        quantized,
        inputs_away=inputs_away,
        made_at_use=n_shards > 1 and recipe.scaling != "tensor",
        one_scale=recipe.scaling == "tensor",
    )
    step.run(mode, largest_temporary=optimizer == "reference")
    if mode == "step" and (fetched := [sizes.width] * ("gradients" in away) + [widths.get(name, 0) for name in away]):
        n_elements = min(config.n_parameters // n_shards, BATCHES_ON_DEVICE * BATCH_ELEMENTS)
        ledger.make("temporaries", fetched=n_elements * sum(fetched))
    return ledger.peak()
