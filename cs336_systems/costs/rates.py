"""The rates that an engine's kernels sustain on a card, from the card's published figures.

    products     the dtype's peak, times the fraction of it that the power limit allows in large matmuls
                 (``hardware.py``), times the engine's fraction
    attention    the engine's fraction of the same, for forward and backward, narrow heads and short sequences
    memory       the engine's fraction of the memory's bandwidth, in passes over norms, SwiGLU, moments
    link         the engine's fraction of the host link, one way and both ways at once; a desktop's memory feeds both
    messages     from one GPU to another of a host, by copy engines over NVLink or by kernels that wait

``Sustained`` holds an engine's fractions: ``OURS`` are fitted on an H200. Other engines, against whose published steps
the predictor is checked, have fractions beside their figures (``answers/ml_dataflow.py``, ``answers/llmq.py``).

    Rates.of(hardware_named("rtx-4090")).products           # FLOP/s
"""

from dataclasses import dataclass, replace

from cs336_systems.hardware import DATA_CENTRE, KINDS, Hardware

NARROW_HEAD = 64
"""The widest head, in dimensions, with which attention is slower."""
HALF_FORWARD, HALF_BACKWARD = 500, 1000
"""Tokens of a causal sequence at which attention reaches half of its rate on long ones. ``hopper`` on an H200 reaches,
in TFLOP/s forward and backward, at d_head 128: 598 and 513 on 4,096 tokens, 657 and 592 on 16,384 (64 heads over 8:
650 and 550); at d_head 64: 387 and 414 on 2,048 tokens, 502 and 527 on 16,384 (rows of attention-training)."""


LINK_SHARE = 0.7
"""The fraction of a GPU's NVLink rate that collectives reach (fitted to 1 MB to 1 GB between two H200s: writeup.md).
Copies from one GPU to another have not been measured and are assumed to reach it, too."""
MESSAGE_BYTES_PER_S = 40e9
"""Bytes/s of a message that two thread blocks carry over NVLink (``distributed/pipeline.py``)."""

IN_BESIDE_GPU, OUT_BESIDE_GPU = 0.25, 0.11
"""The relative slowdown of a GPU's host copies for each other GPU that copies from or to the same host. Fitted to two
H200s that stream together (row of streaming-ring at 066fc93b), whose copies took 25 % longer in and 11 % longer out
than simulated without it. There is no row with more than two GPUs yet."""


@dataclass(frozen=True)
class Sustained:
    """Fractions of a card's rates that the kernels of an engine reach."""

    products: float
    """Fraction of the peak that the card's power allows; attention's fractions are of the same."""
    attention_forward: float
    attention_backward: float
    memory: float
    """Reads and writes together."""
    link_alone: float
    """Fraction of the host link's published rate that copies in one direction reach while the other is idle."""
    link_out_both: float
    """The same for copies from the device while both directions are busy."""
    in_beside_out: float = 1.0
    """Rate of copies to the device / rate of copies from it, while both directions are busy."""
    narrow_forward: float = 0.765
    """Factors of attention's rates with narrow heads (at 16,384 tokens on an H200 502 of 657 TFLOP/s)."""
    narrow_backward: float = 0.90
    """(527 of 592 TFLOP/s.)"""
    quantized: float = 0.0
    """Fraction of the fp8 peak, as for products; 0 for an engine without fp8."""
    operands: float = 0.0
    """bf16 FLOPs that take as long as one byte that products load or store without overlap: small matrices have more of
    these bytes."""
    added: float = 1.0
    """Passes over the gradients of weights that each micro-batch but the first makes besides the products' writes: 1 if
    a product accumulates (it reads them once), 3 if another kernel does (it reads two and writes one)."""


OURS = Sustained(
    products=0.9955,
    attention_forward=0.9745,
    attention_backward=0.8964,
    memory=0.80,
    link_alone=55.5 / 64,
    link_out_both=51 / 64,
    in_beside_out=0.855,
    quantized=0.9642,
    operands=19.5,
)
"""Attention, memory and link were measured alone on an H200: attention in rows of attention-training; norms and SwiGLU
at 0.6 to 0.9 of the bandwidth and AdamW at 0.8 in rows of kernels; the link at 55.5 GB/s one way and, beside kernels of
a step, 43.6 to the device while 50.9 leave it (LOG.md). Products, quantized and operands were fitted on 2026-11-28 to
all steps on one H200 (rows of training, training-2 and training-4 of Qwen2.5 0.5B to 7B in bf16 and fp8)."""


@dataclass(frozen=True)
class _Gain:
    """A commit that made the engine faster."""

    since: str
    """UTC time of the commit, ISO 8601."""
    before: dict[str, float]
    """Shares of the engine until then."""
    on_hopper: bool = False
    """Whether it is one of the kernel for Hopper."""


_GAINS = (
    _Gain("2026-11-30T16:55", {"attention_forward": 0.8746, "narrow_forward": 0.80}, on_hopper=True),  # 3c8d8d13
    _Gain("2026-11-30T07:40", {"attention_backward": 0.8174, "narrow_backward": 0.97}, on_hopper=True),  # c433d046
    _Gain("2026-11-28T09:00", {"added": 3.0}),  # 2e7c03d5: products add to gradients that are there
)
"""Newest first."""


def ours_on(hardware: Hardware, moment: str | None = None) -> Sustained:
    """``OURS`` on a card, as it was when a row was measured (UTC, ISO 8601; None: now).

    Gains of the Hopper kernel count on data centre cards from Hopper on; newer cards, which cannot run it, are assumed
    to have an equally good kernel.
    """
    found = OURS
    for gain in _GAINS:
        elsewhere = gain.on_hopper and (hardware.kind or DATA_CENTRE) != DATA_CENTRE
        if elsewhere or (moment is not None and moment < gain.since):
            found = replace(found, **gain.before)
    return found


@dataclass(frozen=True)
class Rates(Sustained):
    """The rates that a device sustains, in FLOP/s and bytes/s, where ``Sustained`` alone has shares of peaks."""

    beside_copies: float = 0.995
    """Relative speed of kernels while one copy runs; two cost twice as much."""
    copy_latency_s: float = 10e-6
    """Seconds from the end of a copy's last dependency to its first byte."""
    messages: float = MESSAGE_BYTES_PER_S
    """From one GPU to another of its host, each way."""
    in_beside_gpu: float = IN_BESIDE_GPU
    out_beside_gpu: float = OUT_BESIDE_GPU
    others: int = 0
    """Other GPUs of the host that copy all the time."""

    @classmethod
    def of(
        cls,
        hardware: Hardware,
        dtype: str = "bf16",
        sustained: Sustained | None = None,
        *,
        copied_messages: bool = True,
    ) -> "Rates":
        """The rates of an engine on a card.

        Args:
            sustained: the engine's shares; None for this suite's on that card.
            copied_messages: whether copy engines send messages between GPUs; else two thread blocks do, whose slowdown
                of other kernels is not modelled.

        Raises:
            ValueError: a peak, the memory's rate or the link is not published.
        """
        memory, link = hardware.memory_bytes_per_s, hardware.host_link_bytes_per_s
        if hardware.peak(dtype) is None or memory is None or link is None:
            raise ValueError(
                f"no {dtype} FLOP/s, memory or host link are published for {hardware.name}: give the rates"
            )
        sustained = sustained or ours_on(hardware)
        products, fp8 = hardware.sustained_flops(dtype), hardware.sustained_flops("fp8")
        assert products is not None
        between = LINK_SHARE * (hardware.link_bytes_per_s or link) if copied_messages else MESSAGE_BYTES_PER_S
        fed, kind = hardware.host_memory_bytes_per_s or 2 * link, KINDS[hardware.kind or DATA_CENTRE]
        own = replace(
            sustained,
            products=sustained.products * products,
            attention_forward=sustained.attention_forward * kind.attention_forward * products,
            attention_backward=sustained.attention_backward * kind.attention_backward * products,
            memory=sustained.memory * memory,
            link_alone=min(sustained.link_alone * link, fed),
            link_out_both=min(sustained.link_out_both * link, fed / 2),
            quantized=sustained.quantized * (fp8 or 0.0),
        )
        return cls(**vars(own), messages=between)

    def link(self, *, both: bool, copying: int = 0) -> tuple[float, float]:
        """Bytes/s of copies to the device and from it.

        Args:
            both: whether both ways are busy.
            copying: GPUs of the host that copy now besides ``others``.
        """
        into, out, others = self.link_alone, self.link_alone, self.others + copying
        if both:
            into, out = self.link_out_both * self.in_beside_out, self.link_out_both
        return into / (1 + self.in_beside_gpu * others), out / (1 + self.out_beside_gpu * others)

    def attention(self, d_head: int, length: float) -> tuple[float, float]:
        """(forward, backward) FLOP/s of causal attention with heads of ``d_head`` on sequences of ``length`` tokens."""
        forward = self.attention_forward / (1 + HALF_FORWARD / length)
        backward = self.attention_backward / (1 + HALF_BACKWARD / length)
        if d_head > NARROW_HEAD:
            return forward, backward
        return forward * self.narrow_forward, backward * self.narrow_backward

    def link_seconds(self, bytes_in: float, bytes_out: float) -> float:
        """Seconds of copies both ways that begin together."""
        (into, out), (in_alone, out_alone) = self.link(both=True), self.link(both=False)
        both = min(bytes_in / into, bytes_out / out)
        return both + (bytes_in - both * into) / in_alone + (bytes_out - both * out) / out_alone  # one of them is 0
