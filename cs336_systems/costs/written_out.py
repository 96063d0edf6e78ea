"""Peak memory of a step whose blocks have their backward written out, and what backward computes a second time.

A block that says line by line what it makes and drops (``blocks/block.py``) can be predicted line by line: a ledger
goes through the step as the code does, adds every tensor where it is made and takes it off where its last reference
goes. What is alive, block by block:

    kept          what ``costs/kept.py`` says, of every block that backward has not left; autograd gives a block's up
                  when its backward has ended
    gradients     of a whole block from the beginning of its backward on; q, k, v in one piece, gate and up in another
    head          the gradients of its input and its weight are made in forward beside one chunk of logits; backward
                  multiplies them, and so has them twice for a moment
    fully sharded whole weights of the block that runs and of the next ones, whole gradients of the block that runs and
                  of the one that is being reduced, and this rank's shards of all else

    written_out_peak(config, 1, 8192, PRECISIONS["bf16"], "step", keep="products", chunk=4096)

The operations are the fused kernels, whose buffers are counted: partial sums of norms' gains, attention's statistics
and its fp32 sums. Limits: eager execution, no gradients from an earlier micro-batch, and those of ``costs/memory.py``.
Sizes are in bytes. T tokens, D d_model, P = (H + 2 K) E the width of q | k | v, F d_ff, V vocabulary.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from math import prod

from cs336_systems.config import MODES, OPTIMIZERS, ModelConfig, Precision
from cs336_systems.costs.activations import WIDE
from cs336_systems.costs.fsdp import Shape, is_sharded, model_units, shard_elements
from cs336_systems.costs.kept import kept_names, kept_tensors
from cs336_systems.costs.memory import CUBLAS_WORKSPACE_BYTES, PARTS, PeakMemory, cuda_block_bytes, rotary_bytes

FUSED_ATTENTIONS = ("flash", "hopper")
"""Those that a written-out block calls."""

SOURCES: dict[str, tuple[str, ...]] = {
    "normed1": ("x",),
    "qkv": ("normed1",),
    "attended": ("qkv",),
    "lse": ("qkv",),
    "residual": ("x", "attended"),
    "normed2": ("residual",),
    "gate_up": ("normed2",),
    "product": ("gate_up",),
}
"""What each of a block's activations is computed from."""

NORM_PROGRAMS = 264
"""Of the backward of a norm, each with a row of fp32 sums: two per multiprocessor of an H200."""
FEW_TOKENS = 3072
"""Up to so many torch adds up an embedding's gradient without sorting (aten/src/ATen/native/cuda/Embedding.cu)."""
TOKENS_PER_PARTIAL = 10
"""Of equal ones, which a partial sum takes (NROWS_PER_THREAD in EmbeddingBackwardKernel.cu)."""
SLOT_ELEMENTS = 64
"""To which FSDP rounds the place of a parameter in its unit's memory."""


def computed_again(kept: Iterable[str]) -> tuple[str, ...]:
    """The activations that a block's backward computes a second time if these are kept, in the order of forward."""
    kept = frozenset(kept)
    again: set[str] = set()
    wanted = ["gate_up", "product", "residual", "normed2", "attended", "qkv", "normed1"]
    while wanted:
        name = wanted.pop()
        if name not in kept and name not in again and name != "x":
            again.add(name)
            wanted += SOURCES[name]
    return tuple(name for name in SOURCES if name in again and name != "lse")


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
    device_type: str = "cuda",
    workspace_bytes: int = CUBLAS_WORKSPACE_BYTES,
) -> PeakMemory:
    """Predict the peak of allocated memory of one pass of ``mode``, per rank.

    Args:
        keep: a level and switches of ``costs/kept.py``.
        chunk: tokens whose logits the head has at a time.
        attention: of ``FUSED_ATTENTIONS``.
        optimizer: ``reference`` holds one temporary as large as the largest parameter.
        n_shards: ranks of fully sharded data parallelism, blocks and head a unit each; 1 without. Its steps after the
            first are predicted, which know what comes next.
        prefetch: units whose weights are gathered ahead.
        device_type: ``cuda`` counts the allocator's blocks and workspaces; ``cpu`` counts tensors.
        workspace_bytes: cuBLAS's, per thread that multiplies; ignored on the CPU.

    Raises:
        ValueError: no such mode, optimizer, attention, device type, level or switch, or a precision with autocast.
    """
    for name, value, known in (
        ("mode", mode, MODES),
        ("optimizer", optimizer, OPTIMIZERS),
        ("attention of a written-out block", attention, FUSED_ATTENTIONS),
        ("device type", device_type, ("cuda", "cpu")),
    ):
        if value not in known:
            raise ValueError(f"unknown {name} {value!r}: known are {', '.join(known)}")
    on_cuda = device_type == "cuda"
    sizes = _Sizes(config, batch_size, seq_len, precision, attention, chunk, sorts=on_cuda and mode != "forward")
    ledger = _Ledger(cuda_block_bytes if on_cuda else int)
    ledger.make("tables and workspaces", tables=rotary_bytes(config))
    if on_cuda:
        ledger.make(
            "tables and workspaces", **{f"workspace {i}": workspace_bytes for i in range(1 + (mode != "forward"))}
        )
    kept = kept_names(keep) if mode != "forward" else ()
    states = _Sharded(sizes, ledger, n_shards, prefetch) if n_shards > 1 else _Whole(sizes, ledger)
    states.make(moments=mode == "step")
    _Step(sizes, ledger, states, kept).run(mode, largest_temporary=optimizer == "reference")
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
        self.gain_sums = min(tokens, NORM_PROGRAMS) * config.d_model * WIDE
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
        """Of its backward: gradients before they are copied into that of q | k | v, statistics, fp32 sums for dq."""
        config = self.config
        tokens, heads = batch_size * seq_len, batch_size * config.n_heads
        gradients = {
            "dq": tokens * config.d_model * self.width,
            "dk": tokens * config.d_kv * self.width,
            "dv": tokens * config.d_kv * self.width,
        }
        if attention == "flash":
            return gradients | {"lse in base 2": heads * seq_len * WIDE, "delta": heads * seq_len * WIDE}
        padded, columns = -(-seq_len // 128) * 128, 64 if config.d_head <= 64 else 128
        return gradients | {"statistics": heads * 2 * padded * WIDE, "sums of dq": heads * padded * columns * WIDE}

    def block_pieces(self) -> dict[str, int]:
        """A block's weights as they lie in memory, and its gradients: matrices that are multiplied together as one."""
        config, width = self.config, self.width
        d_model, qkv = config.d_model, config.d_model + 2 * config.d_kv
        vectors = {"ln1": d_model, "ln2": d_model} | ({"qkv_bias": qkv} if config.qkv_bias else {})
        matrices = {
            "qkv": qkv * d_model,
            "output": d_model * d_model,
            "gate_up": 2 * config.d_ff * d_model,
            "down": config.d_ff * d_model,
        }
        return {name: n * width for name, n in (vectors | matrices).items()}


class _Ledger:
    """What is alive by name, and the most that was at each moment."""

    def __init__(self, block_bytes: Callable[[int], int]) -> None:
        self._block_bytes = block_bytes
        self._alive: dict[str, tuple[str, int]] = {}
        self._parts: Counter[str] = Counter()
        self._total, self._moment = 0, "states"
        self._most: dict[str, tuple[int, Counter[str]]] = {}

    def at(self, moment: str) -> None:
        self._moment = moment
        self._note()

    def make(self, part: str, /, **sizes: int) -> None:
        """Tensors that are alive together from now on."""
        for name, size in sizes.items():
            assert name not in self._alive, name
            n_bytes = self._block_bytes(size)
            self._alive[name] = part, n_bytes
            self._parts[part] += n_bytes
            self._total += n_bytes
        self._note()

    def free(self, *names: str) -> None:
        for name in names:
            part, n_bytes = self._alive.pop(name)
            self._parts[part] -= n_bytes
            self._total -= n_bytes

    def become(self, name: str, part: str, other: str) -> None:
        """The same tensor under another name."""
        before, n_bytes = self._alive.pop(name)
        self._parts[before] -= n_bytes
        self._parts[part] += n_bytes
        self._alive[other] = part, n_bytes

    def _note(self) -> None:
        if self._total > self._most.get(self._moment, (-1,))[0]:
            self._most[self._moment] = self._total, self._parts.copy()

    def peak(self) -> PeakMemory:
        moments = {moment: total for moment, (total, _) in self._most.items()}
        moment = max(moments, key=lambda name: moments[name])
        parts = self._most[moment][1]
        return PeakMemory(moment, moments[moment], moments, {part: parts[part] for part in PARTS if parts[part]})


class _Whole:
    """Parameters, gradients and moments of one rank that has them all."""

    def __init__(self, sizes: _Sizes, ledger: _Ledger) -> None:
        self.sizes, self.ledger = sizes, ledger
        config = sizes.config
        self.n_units = config.n_layers + 2
        self.head_unit = self.n_units - 1
        block = sizes.block_pieces()
        head = {} if config.tie_embeddings else {"head": sizes.head}
        self.pieces = [{"embedding": sizes.head}, *[block] * config.n_layers, head | {"ln_final": sizes.gain}]
        """Of the embedding, of the blocks in order, and of the head."""

    def make(self, *, moments: bool) -> None:
        self._make("parameters", "weight of", self.pieces)
        if moments:  # which follow the parameters as they are named, not as they lie
            for i, shape in enumerate(shape for unit in model_units(self.sizes.config) for shape in unit):
                n_bytes = prod(shape) * self.sizes.width
                self.ledger.make("optimizer state", **{f"exp_avg {i}": n_bytes, f"exp_avg_sq {i}": n_bytes})

    def _make(self, part: str, what: str, pieces: Iterable[Mapping[str, int]]) -> None:
        for unit, sizes in enumerate(pieces):
            self.ledger.make(part, **{f"{unit} {what} {name}": size for name, size in sizes.items()})

    def begin(self, unit: int) -> None:
        """Of a unit's forward: its weights are needed."""

    def end(self, unit: int, *, last: bool = False) -> None:
        """Of a unit's forward, ``last`` where backward begins with it."""

    def come_to(self, unit: int) -> None:
        """In backward: the units after it are done with."""

    def finish(self) -> None:
        """Backward has come through all units."""


class _Sharded(_Whole):
    """Those of one of several ranks that hold shards: ``distributed/fsdp_schedule.py`` by its effects on memory."""

    def __init__(self, sizes: _Sizes, ledger: _Ledger, n_shards: int, prefetch: int) -> None:
        super().__init__(sizes, ledger)
        self.n_shards, self.prefetch = n_shards, prefetch
        embedding, *blocks, _, head = [*model_units(sizes.config), *([[]] if sizes.config.tie_embeddings else [])]
        self.matrices = [[shape for shape in unit if is_sharded(shape)] for unit in (embedding, *blocks, head)]
        self.gathered: set[int] = set()
        self.reducing: int | None = None
        self.reduced = self.n_units

    def make(self, *, moments: bool) -> None:
        width = self.sizes.width
        vectors = [{name: size for name, size in unit.items() if self._is_vector(name)} for unit in self.pieces]
        self._make("parameters", "weight of", vectors)
        for unit, matrices in enumerate(self.matrices):
            shards = sum(self._slot(shape, 1) for shape in matrices)
            self.ledger.make("parameters", **{f"{unit} shards": shards * width})
        if moments:
            for i, shape in enumerate(shape for unit in model_units(self.sizes.config) for shape in unit):
                n_bytes = shard_elements(shape, self.n_shards) * width
                self.ledger.make("optimizer state", **{f"exp_avg {i}": n_bytes, f"exp_avg_sq {i}": n_bytes})

    @staticmethod
    def _is_vector(piece: str) -> bool:
        return piece in ("ln1", "ln2", "qkv_bias", "ln_final")

    def _slot(self, shape: Shape, n_shards: int) -> int:
        return -(-shard_elements(shape, self.n_shards) * n_shards // SLOT_ELEMENTS) * SLOT_ELEMENTS

    def _group(self, unit: int) -> int:
        """The unit that has its weights: a tied head's are the embedding's."""
        return 0 if not self.matrices[unit] else unit

    def _gather(self, unit: int) -> None:
        group = self._group(unit)
        if group not in self.gathered:
            self.gathered.add(group)
            whole = sum(self._slot(shape, self.n_shards) for shape in self.matrices[group])
            self.ledger.make("gathered parameters", **{f"{group} gathered": whole * self.sizes.width})

    def _free(self, unit: int) -> None:
        self.gathered.remove(unit)
        self.ledger.free(f"{unit} gathered")

    def begin(self, unit: int) -> None:
        for each in range(unit, min(unit + self.prefetch, self.head_unit) + 1):
            self._gather(each)

    def end(self, unit: int, *, last: bool = False) -> None:
        stays = last or (unit == 0 and self._group(self.head_unit) == 0)  # a tied embedding is used again
        if not stays and unit in self.gathered:
            self._free(unit)

    def come_to(self, unit: int) -> None:
        window = {self._group(each) for each in range(max(0, unit - self.prefetch), unit + 1)}
        tied = {0} if self._group(self.head_unit) == 0 else set()
        for group in self.gathered - window - tied:
            self._free(group)
        for each in sorted(window, reverse=True):
            self._gather(each)
        if unit < self.head_unit and self._group(unit + 1) != 0:
            self._reduce(unit + 1)

    def _reduce(self, unit: int) -> None:
        self._finish_reduction()
        self.reducing = unit
        shards = sum(shard_elements(shape, self.n_shards) for shape in self.matrices[unit])
        self.ledger.make("gradients", **{f"{unit} gradients of shards": shards * self.sizes.width})

    def _finish_reduction(self) -> None:
        if self.reducing is not None:
            matrices = (name for name in self.pieces[self.reducing] if not self._is_vector(name))
            self.ledger.free(*(f"{self.reducing} gradient of {name}" for name in matrices))

    def finish(self) -> None:
        for group in list(self.gathered):
            self._free(group)
        self._reduce(0)
        self._finish_reduction()


class _Step:
    """Goes through forward, backward and optimizer as ``model/transformer.py`` and ``blocks/`` do."""

    def __init__(self, sizes: _Sizes, ledger: _Ledger, states: _Whole, kept: tuple[str, ...]) -> None:
        self.sizes, self.ledger, self.states, self.kept = sizes, ledger, states, frozenset(kept)
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
            part = "activations" if name in self.kept else "temporaries"
            self.ledger.make(part, **{f"{block} {name}": self.sizes.of[name]})

    def _drop(self, block: int, *names: str) -> None:
        """Unless they are kept."""
        self.ledger.free(*(f"{block} {name}" for name in names if name not in self.kept))

    def _block_forward(self, i: int) -> None:
        ledger = self.ledger
        ledger.at(f"block {i}, attention")
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
        if "residual" in self.kept:
            ledger.make("activations", **{f"{i + 1} x": self.sizes.stream})
        else:  # the down projection is added to it where it lies
            ledger.become(f"{i} residual", "activations", f"{i + 1} x")
        self._drop(i, "product", "rstd1", "rstd2", "x")

    def _block_backward(self, i: int) -> None:
        """From ``dy`` to ``dy`` of the block before."""
        ledger, sizes = self.ledger, self.sizes
        stream, recalled = sizes.stream, _Recalled(sizes, ledger, self.kept)
        ledger.at(f"block {i}, feed-forward backward")
        ledger.make("gradients", **{f"{i + 1} gradient of {name}": n for name, n in sizes.block_pieces().items()})
        recalled.want("gate_up")
        again = {} if "product" in self.kept else {"product again": sizes.inner}
        ledger.make("temporaries", dproduct=sizes.inner, dgate_up=2 * sizes.inner, **again)
        ledger.free("dproduct", *again)
        recalled.forget("gate_up")
        recalled.want("residual")
        recalled.want("normed2")
        ledger.make("temporaries", dnormed2=stream)
        ledger.free("dgate_up")
        recalled.forget("normed2")
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
        ledger.free(*(f"{i} {name}" for name in self.kept))
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
        ledger.make("loss", scaled=sizes.stream)
        ledger.make("gradients", **{f"{unit} gradient of head": sizes.head})
        ledger.free("dhead", "dnormed")
        ledger.make("temporaries", dy=sizes.stream, sums=sizes.gain_sums)
        ledger.make("gradients", **{f"{unit} gradient of ln_final": sizes.gain})
        ledger.free("sums", "scaled", "rstd", f"{self.n_layers} x")


class _Recalled:
    """What a block's backward has computed again, as ``blocks.block._Recalled``."""

    def __init__(self, sizes: _Sizes, ledger: _Ledger, kept: frozenset[str]) -> None:
        self.sizes, self.ledger, self.there, self.made = sizes, ledger, set(kept), set[str]()

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
        made = {f"again {name}": self.sizes.of[name] for name in names}
        self.ledger.make("temporaries", **beside, **made)
        self.ledger.free(*beside)
        self.made |= set(names)
        self.there |= set(names)

    def forget(self, *names: str) -> None:
        self.ledger.free(*(f"again {name}" for name in names if name in self.made))
        self.made -= set(names)
        self.there -= set(names)
