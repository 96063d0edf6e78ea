"""The step that ``written_out.py`` follows: which tensors are made and dropped, line by line, as in the code."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from cs336_systems.costs.held_states import Whole, block_pieces
from cs336_systems.costs.kept import OPERANDS
from cs336_systems.costs.ledger import Ledger
from cs336_systems.costs.written_out_sizes import Sizes

NORM_OF = {"normed1": "x", "normed2": "residual"}


class Step:
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
        one_scale: bool,
    ) -> None:
        self.sizes, self.ledger, self.states, self.kept = sizes, ledger, states, kept
        self.inputs_away = inputs_away
        self.n_layers = sizes.config.n_layers
        self.quantized, self.made_at_use, self.one_scale = quantized, made_at_use, one_scale

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
        stored = {"stored": self.sizes.of[name]} if self.stores(block, name) else {}
        self.ledger.make("temporaries", **stored)
        self.ledger.make("temporaries", **{f"{block} {name} rows": self.sizes.elements[name]})
        if name in self.kept[block]:
            self.ledger.make("activations", **{f"{block} {name}": self.sizes.elements[name]})
        self.ledger.free(*stored)

    def stores(self, block: int, name: str) -> bool:
        """Whether what products read is there in the block's dtype first: norms with one scale are not."""
        return not (self.quantized[block] and self.one_scale and name in NORM_OF)

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

    def _product_backward(self, block: int, weight: str) -> AbstractContextManager[None]:
        """The same, of a weight's columns."""
        if self.quantized[block]:
            self.states.transpose(block + 1, weight, self.sizes.matrices[weight])
        return self._product(block, weight)

    def _read_gradient(self, block: int, elements: int, *made_from: str) -> None:
        """Both ways of a gradient of an activation, until ``_done_with_gradient``, out of what is freed then."""
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
            norm = {"norm": sizes.stream} if self.stores(i, "normed2") else {}
            ledger.make("temporaries", **norm)
            ledger.free("branch", *norm)
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
        with self._product_backward(i, "down"):
            ledger.make("temporaries", dproduct=sizes.inner)  # and then the product again; gate_up becomes its gradient
        again = {}
        if self.quantized[i]:
            again = {"product columns": sizes.elements["product"]} if "product" not in self.kept[i] else {}
            made = {f"dgate_up {way}": sizes.elements["gate_up"] for way in ("rows", "columns")}
            ledger.make("temporaries", **again, **made)
            recalled.forget("gate_up")
        ledger.free("dproduct")
        ledger.free(*again)
        self._done_with_gradient(i)
        recalled.forget("product")
        if self.quantized[i]:
            for way in ("rows", "columns"):
                ledger.become(f"dgate_up {way}", "temporaries", f"gradient {way}")
        recalled.want("residual")
        recalled.want_operand("normed2")
        with self._product_backward(i, "gate_up"):
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
        with self._product_backward(i, "output"):
            ledger.make("temporaries", dattended=stream)
        self._done_with_gradient(i)
        recalled.want("qkv")
        ledger.make("temporaries", dqkv=sizes.of["qkv"])
        ledger.make("temporaries", **sizes.attention_buffers)
        ledger.free(*sizes.attention_buffers, "dattended")
        recalled.forget("qkv", "attended", "lse")
        self._read_gradient(i, sizes.elements["qkv"], "dqkv")
        recalled.want_operand("normed1")
        with self._product_backward(i, "qkv"):
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

    def __init__(self, step: Step, block: int) -> None:
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
            stored = self.step.stores(self.block, name)
            self.want(name if stored else NORM_OF[name])
            again = {f"again {name} columns": self.sizes.elements[name]}
            again |= {f"again {name} rows": self.sizes.elements[name]} if rows else {}
            self.ledger.make("temporaries", **again)
            self.ledger.free(*([self.operands[name]] if name in self.operands else []))
            self.ledger.free(*([self.there.pop(name)] if stored else []))
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
                norm = ["normed2"] if self.step.stores(self.block, "normed2") else []
                self._make("residual", *norm, again_rstd=row)
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
