"""Peak memory of a step whose blocks have their backward written out.

A block that says line by line what it makes and drops (``blocks/block.py``) can be predicted line by line: a ledger
goes through the step as the code does, adds every tensor where it is made and takes it off where its last reference
goes. What is alive, block by block:

    kept          what ``costs/kept.py`` says, of every block that backward has not reached; of the one that it is in,
                  what it has still to read
    gradients     of a whole block from the beginning of its backward on; q, k, v in one piece, gate and up in another
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

from cs336_systems.config import MODES, OPTIMIZERS, WRITTEN_OUT_ATTENTIONS, ModelConfig, Precision
from cs336_systems.costs.activations import WIDE
from cs336_systems.costs.held_states import Accumulated, Leaving, Sharded, Whole, block_pieces
from cs336_systems.costs.kept import keep_of_blocks, kept_names, kept_tensors
from cs336_systems.costs.ledger import Ledger
from cs336_systems.costs.memory import CUBLAS_WORKSPACE_BYTES, PeakMemory, cuda_block_bytes, rotary_bytes
from cs336_systems.costs.offload import BATCH_ELEMENTS, BATCHES_ON_DEVICE, IN_FLIGHT_BYTES

MULTIPROCESSORS = 132
"""Of an H200; the backward of a norm runs three programs on each, or one where rows are long, with fp32 sums each."""
FEW_TOKENS = 3072
"""Up to so many torch adds up an embedding's gradient without sorting (aten/src/ATen/native/cuda/Embedding.cu)."""
TOKENS_PER_PARTIAL = 10
"""Of equal ones, which a partial sum takes (NROWS_PER_THREAD in EmbeddingBackwardKernel.cu)."""


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
    sizes = _Sizes(config, batch_size, seq_len, precision, attention, chunk, sorts=on_cuda and mode != "forward")
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
        held: Whole = Sharded(*of, n_shards, prefetch, update)
    elif "gradients" in away:
        held = Leaving(*of, accumulates=accumulates, in_flight_bytes=IN_FLIGHT_BYTES)
    else:
        held = Accumulated(*of) if accumulates else Whole(*of)
    held.make({name: width for name, width in widths.items() if name not in away} if mode == "step" else {})
    step = _Step(sizes, ledger, held, kept, inputs_away="residual" in away and mode != "forward")
    step.run(mode, largest_temporary=optimizer == "reference")
    if mode == "step" and (fetched := [sizes.width] * ("gradients" in away) + [widths.get(name, 0) for name in away]):
        n_elements = min(config.n_parameters // n_shards, BATCHES_ON_DEVICE * BATCH_ELEMENTS)
        ledger.make("temporaries", fetched=n_elements * sum(fetched))
    return ledger.peak()


class _Sizes:
    """Bytes of every tensor of a step by its name in the code, and of every parameter."""

    def __init__(
        self,
        config: ModelConfig,
        batch_size: int,
        seq_len: int,
        precision: Precision,
        attention: str,
        chunk: int,
        *,
        sorts: bool,
    ) -> None:
        self.config, self.width = config, precision.parameter_bytes
        tokens, width = batch_size * seq_len, self.width
        of = {tensor.name: tensor.n_bytes for tensor in kept_tensors(config, batch_size, seq_len, precision, "all")}
        self.of = of
        self.stream, self.row, self.inner = of["x"], of["rstd1"], of["product"]
        self.gain = config.d_model * width
        rows = min(32, max(1, 2048 >> (config.d_model - 1).bit_length()))  # that a program of a norm holds at once
        programs = MULTIPROCESSORS * (3 if config.d_model <= 2048 else 1)
        self.gain_sums = min(-(-tokens // rows), programs) * config.d_model * WIDE
        self.head = config.vocab_size * config.d_model * width
        words = -(-config.vocab_size // 16) * 16
        self.logits = min(chunk, tokens) * words * width
        self.attention_buffers = self._attention_buffers(attention, batch_size, seq_len)
        partial_rows = tokens // TOKENS_PER_PARTIAL + min(tokens, config.vocab_size)
        indices = {f"embedding indices {i}": 8 * tokens for i in range(4)}
        self.embedding_buffers = (
            {"embedding sums": partial_rows * config.d_model * WIDE, **indices} if sorts and tokens > FEW_TOKENS else {}
        )

    def _attention_buffers(self, attention: str, batch_size: int, seq_len: int) -> dict[str, int]:
        """Of its backward, which writes into the gradient of q | k | v: statistics, and fp32 sums for dq."""
        config, heads = self.config, batch_size * self.config.n_heads
        if attention == "flash":
            return {"lse in base 2": heads * seq_len * WIDE, "delta": heads * seq_len * WIDE}
        padded, columns = -(-seq_len // 128) * 128, 64 if config.d_head <= 64 else 128
        return {"statistics": heads * 2 * padded * WIDE, "sums of dq": heads * padded * columns * WIDE}


class _Step:
    """Goes through forward, backward and optimizer as ``model/transformer.py`` and ``blocks/`` do."""

    def __init__(
        self, sizes: _Sizes, ledger: Ledger, states: Whole, kept: list[frozenset[str]], *, inputs_away: bool
    ) -> None:
        self.sizes, self.ledger, self.states, self.kept = sizes, ledger, states, kept
        self.inputs_away = inputs_away
        self.n_layers = sizes.config.n_layers

    def run(self, mode: str, *, largest_temporary: bool) -> None:
        config, ledger, states, sizes = self.sizes.config, self.ledger, self.states, self.sizes
        backward = mode != "forward"
        ledger.at("embedding")
        states.begin(0)
        ledger.make("activations", **{"0 x": sizes.stream})
        states.end(0)
        for i in range(self.n_layers):
            states.begin(i + 1)
            self._block_forward(i)
            states.end(i + 1)
        states.begin(states.head_unit)
        self._head_forward(backward=backward)
        states.end(states.head_unit, last=backward)
        if not backward:
            return
        states.come_to(states.head_unit)
        self._head_backward()
        for i in reversed(range(self.n_layers)):
            states.come_to(i + 1)
            self._block_backward(i)
        states.come_to(0)
        ledger.at("embedding backward")
        ledger.make("gradients", **{"0 gradient of embedding": sizes.head})
        ledger.make("temporaries", **sizes.embedding_buffers)
        ledger.free(*sizes.embedding_buffers, "dy")
        if config.tie_embeddings:
            ledger.free(f"{states.head_unit} gradient of head")
        states.finish()
        if mode == "step":
            ledger.at("optimizer")
            largest = max(config.vocab_size, config.d_ff) * config.d_model * sizes.width
            if largest_temporary:
                ledger.make("temporaries", update=largest)

    # one block; its tensors are named as in blocks/block.py

    def _make(self, block: int, *names: str) -> None:
        for name in names:
            part = "activations" if name in self.kept[block] else "temporaries"
            self.ledger.make(part, **{f"{block} {name}": self.sizes.of[name]})

    def _drop(self, block: int, *names: str) -> None:
        """Unless they are kept."""
        self.ledger.free(*(f"{block} {name}" for name in names if name not in self.kept[block]))

    def _block_forward(self, i: int) -> None:
        ledger = self.ledger
        ledger.at(f"block {i}, attention")
        if self.inputs_away and i:
            ledger.free(f"{i - 1} x")
        self._make(i, "normed1", "rstd1")
        self._make(i, "qkv")
        self._drop(i, "normed1")
        self._make(i, "attended", "lse")
        self._drop(i, "qkv")
        ledger.make("temporaries", branch=self.sizes.stream)
        self._make(i, "residual", "normed2", "rstd2")
        ledger.free("branch")
        self._drop(i, "attended", "lse")
        ledger.at(f"block {i}, feed-forward")
        self._make(i, "gate_up")
        self._drop(i, "normed2")
        self._make(i, "product")
        self._drop(i, "gate_up")
        if "residual" in self.kept[i]:
            ledger.make("activations", **{f"{i + 1} x": self.sizes.stream})
        else:  # the down projection is added to it where it lies
            ledger.become(f"{i} residual", "activations", f"{i + 1} x")
        self._drop(i, "product", "rstd1", "rstd2", "x")

    def _block_backward(self, i: int) -> None:
        """From ``dy`` to ``dy`` of the block before."""
        ledger, sizes = self.ledger, self.sizes
        if self.inputs_away and i:
            ledger.make("activations", **{f"{i - 1} x": sizes.stream})
        stream, recalled = sizes.stream, _Recalled(sizes, ledger, i, self.kept[i])
        ledger.at(f"block {i}, feed-forward backward")
        ledger.make(
            "gradients",
            **{f"{i + 1} gradient of {name}": n for name, n in block_pieces(sizes.config, sizes.width).items()},
        )
        recalled.want("gate_up")
        ledger.make("temporaries", dproduct=sizes.inner)  # and then the product again; gate_up becomes its gradient
        ledger.free("dproduct")
        recalled.forget("product")
        recalled.want("residual")
        recalled.want("normed2")
        ledger.make("temporaries", dnormed2=stream)
        recalled.forget("gate_up", "normed2")
        ledger.make("temporaries", dresidual=stream, dgain=sizes.gain, sums=sizes.gain_sums)
        ledger.free("sums", "dnormed2")
        recalled.forget("residual")

        ledger.at(f"block {i}, attention backward")
        recalled.want("attended")
        ledger.make("temporaries", dattended=stream)
        recalled.want("qkv")
        ledger.make("temporaries", dqkv=sizes.of["qkv"])
        ledger.make("temporaries", **sizes.attention_buffers)
        ledger.free(*sizes.attention_buffers, "dattended")
        recalled.forget("qkv", "attended", "lse")
        recalled.want("normed1")
        ledger.make("temporaries", dnormed1=stream)
        ledger.free("dqkv")
        recalled.forget("normed1")
        ledger.make("temporaries", dx=stream, sums=sizes.gain_sums, **{"dgain of ln1": sizes.gain})
        ledger.free("sums", "dnormed1", "dresidual", "dgain", "dgain of ln1", "dy")
        recalled.forget("x", "rstd1", "rstd2")
        ledger.become("dx", "temporaries", "dy")

    # final norm, head and loss

    def _head_forward(self, *, backward: bool) -> None:
        ledger, sizes = self.ledger, self.sizes
        ledger.at("loss")
        ledger.make("loss", normed=sizes.stream)
        if backward:
            ledger.make("loss", rstd=sizes.row, dhead=sizes.head, dnormed=sizes.stream)
        ledger.make("loss", losses=sizes.row, lse=sizes.row, logits=sizes.logits)
        ledger.free("losses", "lse", "logits", "normed")

    def _head_backward(self) -> None:
        ledger, sizes, unit = self.ledger, self.sizes, self.states.head_unit
        ledger.at("loss backward")
        ledger.become("dhead", "gradients", f"{unit} gradient of head")
        ledger.make("temporaries", dy=sizes.stream, sums=sizes.gain_sums)
        ledger.make("gradients", **{f"{unit} gradient of ln_final": sizes.gain})
        ledger.free("sums", "dnormed", "rstd", f"{self.n_layers} x")


class _Recalled:
    """A block's activations in its backward, kept or computed again: as ``blocks.block._Recalled``."""

    def __init__(self, sizes: _Sizes, ledger: Ledger, block: int, kept: frozenset[str]) -> None:
        self.sizes, self.ledger = sizes, ledger
        self.there = {name: f"{block} {name}" for name in kept}
        """Names on the ledger."""

    def want(self, name: str) -> None:
        if name in self.there:
            return
        stream, row = self.sizes.stream, self.sizes.row
        match name:
            case "normed1":
                self._make("normed1", again_rstd=row)
            case "qkv":
                self.want("normed1")
                self._make("qkv")
            case "attended" | "lse":
                self.want("qkv")
                self._make("attended", "lse")
            case "residual":
                self.want("attended")
                self._make("residual", "normed2", branch=stream, again_rstd=row)
            case "normed2":
                self.want("residual")
                if name not in self.there:
                    self._make("normed2", again_rstd=row)
            case _:
                assert name == "gate_up", name
                self.want("normed2")
                self._make("gate_up")

    def _make(self, *names: str, **beside: int) -> None:
        """Those names, beside what lives no longer than that takes."""
        self.ledger.make("temporaries", **beside, **{f"again {name}": self.sizes.of[name] for name in names})
        self.ledger.free(*beside)
        self.forget(*names)  # a norm that was kept, where its residual brings it anew
        self.there |= {name: f"again {name}" for name in names}

    def forget(self, *names: str) -> None:
        self.ledger.free(*(self.there.pop(name) for name in names if name in self.there))
