"""Peak memory of a step whose blocks have their backward written out.

A block that says line by line what it makes and drops (``blocks/block.py``) can be predicted line by line: a ledger
goes through the step as the code does, adds every tensor where it is made and takes it off where its last reference
goes. What is alive, block by block:

    kept          what ``costs/kept.py`` says, of every block that backward has not reached; of the one that it is in,
                  what it has still to read
    gradients     of a whole block from the beginning of its backward on; q, k, v in one piece, gate and up in another
    quantized     of weights two copies of a byte; what products read in one or two, as they are made and dropped; the
                  few bytes of scales are left out
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

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

from cs336_systems.config import MODES, OPTIMIZERS, WRITTEN_OUT_ATTENTIONS, ModelConfig, Precision, Recipe
from cs336_systems.costs.held_states import Accumulated, Leaving, Sharded, Whole, block_pieces
from cs336_systems.costs.kept import KEPT, STORED, keep_of_blocks, kept_names
from cs336_systems.costs.ledger import Ledger
from cs336_systems.costs.memory import CUBLAS_WORKSPACE_BYTES, PeakMemory, cuda_block_bytes, rotary_bytes
from cs336_systems.costs.offload import BATCH_ELEMENTS, BATCHES_ON_DEVICE, IN_FLIGHT_BYTES
from cs336_systems.costs.written_out_sizes import Sizes

OPERANDS = tuple(row.name for row in KEPT if row.operand)


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
        recipe: of the blocks' products; weights that are quantized stay so, and are made at each use if sharded.
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
        held: Whole = Sharded(*of, n_shards, prefetch, update)
    elif "gradients" in away:
        held = Leaving(*of, accumulates=accumulates, in_flight_bytes=IN_FLIGHT_BYTES)
    else:
        held = Accumulated(*of) if accumulates else Whole(*of)
    held.make({name: width for name, width in widths.items() if name not in away} if mode == "step" else {})
    for i in (i for i in range(config.n_layers) if quantized[i] and n_shards == 1):
        for name, n in sizes.matrices.items():
            ledger.make("parameters", **{f"{i} quantized {name}": n, f"{i} quantized {name}, transposed": n})
    inputs_away = "residual" in away and mode != "forward"
    step = _Step(sizes, ledger, held, kept, quantized, inputs_away=inputs_away, made_at_use=n_shards > 1)
    step.run(mode, largest_temporary=optimizer == "reference")
    if mode == "step" and (fetched := [sizes.width] * ("gradients" in away) + [widths.get(name, 0) for name in away]):
        n_elements = min(config.n_parameters // n_shards, BATCHES_ON_DEVICE * BATCH_ELEMENTS)
        ledger.make("temporaries", fetched=n_elements * sum(fetched))
    return ledger.peak()


class _Step:
    """Goes through forward, backward and optimizer as ``model/transformer.py`` and ``blocks/`` do."""

    def __init__(
        self,
        sizes: Sizes,
        ledger: Ledger,
        states: Whole,
        kept: list[frozenset[str]],
        quantized: list[bool],
        *,
        inputs_away: bool,
        made_at_use: bool,
    ) -> None:
        self.sizes, self.ledger, self.states, self.kept = sizes, ledger, states, kept
        self.inputs_away = inputs_away
        self.n_layers = sizes.config.n_layers
        self.quantized, self.made_at_use = quantized, made_at_use

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

    def _make_operand(self, block: int, name: str) -> None:
        """What products read; quantized, its rows and, if it is kept, its columns."""
        if not self.quantized[block]:
            self._make(block, name)
            return
        self.ledger.make("temporaries", stored=self.sizes.of[name])
        self.ledger.make("temporaries", **{f"{block} {name} rows": self.sizes.elements[name]})
        if name in self.kept[block]:
            self.ledger.make("activations", **{f"{block} {name}": self.sizes.elements[name]})
        self.ledger.free("stored")

    def _drop_operand(self, block: int, name: str) -> None:
        if self.quantized[block]:
            self.ledger.free(f"{block} {name} rows")
        else:
            self._drop(block, name)

    @contextmanager
    def _product(self, block: int, weight: str, **beside: int) -> Iterator[None]:
        """While a quantized product runs: the weight where it is made at each use, and what else it reads."""
        if self.quantized[block]:
            read = beside | ({"quantized weight": self.sizes.matrices[weight]} if self.made_at_use else {})
            self.ledger.make("temporaries", **read)
            yield
            self.ledger.free(*read)
        else:
            yield

    def _read_gradient(self, block: int, elements: int, *made_from: str) -> None:
        """Both ways of a gradient of an activation, out of what is freed then; ``_read`` says until when."""
        if self.quantized[block]:
            self.ledger.make("temporaries", **{"gradient rows": elements, "gradient columns": elements})
            self.ledger.free(*made_from)

    def _done_with_gradient(self, block: int, *stored: str) -> None:
        self.ledger.free(*(("gradient rows", "gradient columns") if self.quantized[block] else stored))

    def _drop(self, block: int, *names: str) -> None:
        """Unless they are kept."""
        self.ledger.free(*(f"{block} {name}" for name in names if name not in self.kept[block]))

    def _block_forward(self, i: int) -> None:
        ledger = self.ledger
        ledger.at(f"block {i}, attention")
        if self.inputs_away and i:
            ledger.free(f"{i - 1} x")
        sizes = self.sizes
        self._make(i, "rstd1")
        self._make_operand(i, "normed1")
        with self._product(i, "qkv"):
            self._make(i, "qkv")
        self._drop_operand(i, "normed1")
        self._make(i, "attended", "lse")
        self._drop(i, "qkv")
        with self._product(i, "output", **{"attended rows": sizes.elements["attended"]}):
            ledger.make("temporaries", branch=sizes.stream)
        self._make(i, "residual", "rstd2")
        if self.quantized[i]:
            ledger.make("temporaries", **{"norm": sizes.stream})
            ledger.free("branch", "norm")
            self._drop(i, "attended", "lse")
            self._make_operand(i, "normed2")
        else:
            self._make(i, "normed2")
            ledger.free("branch")
            self._drop(i, "attended", "lse")
        ledger.at(f"block {i}, feed-forward")
        if self.quantized[i]:
            with self._product(i, "gate_up"):
                self._make(i, "gate_up")
                ledger.make("temporaries", product=sizes.inner)
            self._drop_operand(i, "normed2")
            self._drop(i, "gate_up")
            ledger.free("product")
            self._make_operand(i, "product")
        else:
            self._make(i, "gate_up", "product")  # in one launch
            self._drop(i, "normed2", "gate_up")
        if "residual" in self.kept[i]:
            ledger.make("activations", **{f"{i + 1} x": sizes.stream})
        else:  # the down projection is added to it where it lies
            ledger.become(f"{i} residual", "activations", f"{i + 1} x")
        with self._product(i, "down", branch=sizes.stream):
            pass
        self._drop_operand(i, "product")
        self._drop(i, "rstd1", "rstd2", "x")

    def _block_backward(self, i: int) -> None:
        """From ``dy`` to ``dy`` of the block before."""
        ledger, sizes = self.ledger, self.sizes
        if self.inputs_away and i:
            ledger.make("activations", **{f"{i - 1} x": sizes.stream})
        stream, recalled = sizes.stream, _Recalled(self, i)
        ledger.at(f"block {i}, feed-forward backward")
        ledger.make(
            "gradients",
            **{f"{i + 1} gradient of {name}": n for name, n in block_pieces(sizes.config, sizes.width).items()},
        )
        recalled.want("gate_up")
        self._read_gradient(i, sizes.elements["x"])
        with self._product(i, "down"):
            ledger.make("temporaries", dproduct=sizes.inner)  # and then the product again; gate_up becomes its gradient
        if self.quantized[i] and "product" not in self.kept[i]:
            ledger.make("temporaries", **{"product columns": sizes.elements["product"]})
            ledger.free("product columns")
        ledger.free("dproduct")
        self._done_with_gradient(i)
        recalled.forget("product")
        self._read_gradient(i, sizes.elements["gate_up"])
        if self.quantized[i]:
            recalled.forget("gate_up")
        recalled.want("residual")
        recalled.want_operand("normed2")
        with self._product(i, "gate_up"):
            ledger.make("temporaries", dnormed2=stream)
        self._done_with_gradient(i)
        recalled.forget("gate_up", "normed2")
        ledger.make("temporaries", dresidual=stream, dgain=sizes.gain, sums=sizes.gain_sums)
        ledger.free("sums", "dnormed2")
        recalled.forget("residual")

        ledger.at(f"block {i}, attention backward")
        self._read_gradient(i, sizes.elements["x"])
        recalled.want("attended")
        if self.quantized[i]:
            ledger.make("temporaries", **{"attended columns": sizes.elements["attended"]})
            ledger.free("attended columns")
        with self._product(i, "output"):
            ledger.make("temporaries", dattended=stream)
        self._done_with_gradient(i)
        recalled.want("qkv")
        ledger.make("temporaries", dqkv=sizes.of["qkv"])
        ledger.make("temporaries", **sizes.attention_buffers)
        ledger.free(*sizes.attention_buffers, "dattended")
        recalled.forget("qkv", "attended", "lse")
        self._read_gradient(i, sizes.elements["qkv"], "dqkv")
        recalled.want_operand("normed1")
        with self._product(i, "qkv"):
            ledger.make("temporaries", dnormed1=stream)
        self._done_with_gradient(i, "dqkv")
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

    def __init__(self, step: _Step, block: int) -> None:
        self.step, self.sizes, self.ledger, self.block = step, step.sizes, step.ledger, block
        self.there = {name: f"{block} {name}" for name in step.kept[block]}
        """Names on the ledger."""
        self.quantized = step.quantized[block]
        self.operands = {name: self.there.pop(name) for name in OPERANDS if self.quantized and name in self.there}
        """Names on the ledger of quantized columns."""
        self.rows: set[str] = set()
        """Of which there are quantized rows, too."""

    def want_operand(self, name: str, *, rows: bool = False) -> None:
        """As products read it; quantized, its columns, and its rows where what follows it is computed again."""
        if not self.quantized:
            self.want(name)
        elif rows or name not in self.operands:
            self.want(name)
            again = {f"again {name} columns": self.sizes.elements[name]}
            again |= {f"again {name} rows": self.sizes.elements[name]} if rows else {}
            self.ledger.make("temporaries", **again)
            self.ledger.free(*([self.operands[name]] if name in self.operands else []), self.there.pop(name))
            self.operands[name] = f"again {name} columns"
            self.rows |= {name} if rows else set()

    def want(self, name: str) -> None:
        if name in self.there:
            return
        stream, row = self.sizes.stream, self.sizes.row
        match name:
            case "normed1":
                self._make("normed1", again_rstd=row)
            case "qkv":
                self.want_operand("normed1", rows=True)
                with self.step._product(self.block, "qkv"):
                    self._make("qkv")
            case "attended" | "lse":
                self.want("qkv")
                self._make("attended", "lse")
            case "residual":
                self.want("attended")
                with self.step._product(self.block, "output", **{"attended rows": self.sizes.elements["attended"]}):
                    self.ledger.make("temporaries", branch=stream)
                self._make("residual", "normed2", again_rstd=row)
                self.ledger.free("branch")
            case "normed2":
                self.want("residual")
                if name not in self.there:
                    self._make("normed2", again_rstd=row)
            case _:
                assert name == "gate_up", name
                self.want_operand("normed2", rows=True)
                with self.step._product(self.block, "gate_up"):
                    self._make("gate_up")

    def _make(self, *names: str, **beside: int) -> None:
        """Those names, beside what lives no longer than that takes."""
        self.ledger.make("temporaries", **beside, **{f"again {name}": self.sizes.of[name] for name in names})
        self.ledger.free(*beside)
        # A norm that was kept, where its residual brings it anew.
        self.ledger.free(*(self.there.pop(name) for name in names if name in self.there))
        if "residual" in names and "normed2" in self.operands:
            self.ledger.free(self.operands.pop("normed2"))
        self.there |= {name: f"again {name}" for name in names}

    def forget(self, *names: str) -> None:
        self.ledger.free(*(self.there.pop(name) for name in names if name in self.there))
        self.ledger.free(*(self.operands.pop(name) for name in names if name in self.operands))
        self.ledger.free(*(f"again {name} rows" for name in names if name in self.rows))
        self.rows -= set(names)
