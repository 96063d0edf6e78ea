"""Options of ``benchmark_streaming.py``, and its grid. Imports no torch."""

import itertools
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from cs336_systems.config import ModelConfig, did_you_mean, resolve_size
from cs336_systems.experiments.options import RunOptions, cell_of, flag
from cs336_systems.hardware import HARDWARE, Hardware

Order = Literal["auto", "sequential", "interleaved"]
Peer = Literal["compiled", "fsdp2-offload"]


@dataclass(frozen=True)
class Options(RunOptions):
    """What does a training step cost under caps on device and host memory?"""

    CPU_DEFAULTS: ClassVar = {"size": ("tiny",), "steps": 2}

    size: tuple[str, ...] = ("llama3-8b",)
    """Named model sizes; weights are random, so sequences may be longer than the published models were trained for."""
    context_length: tuple[int, ...] | None = None
    """Tokens per sequence; by default 8192, and 64 for tiny."""
    device_gib: tuple[float, ...] | None = None
    """Caps on device memory: all that the process has there, CUDA's context included; by default 24, for tiny one that
    holds the model and one that does not."""
    host_gib: tuple[float, ...] | None = None
    """Caps on host memory of the process; by default 75, and 0.001 for tiny, or with fp32 masters 140 and 0.002."""
    order: tuple[Order, ...] = ("auto",)
    """Order of rounds: sequential; interleaved, forward of a round under backward of the one before; auto, the faster
    one."""
    chunk: int | None = None
    """Tokens that a layer processes at a time; by default the fastest, and 32 for tiny."""
    tokens_per_step: int | None = None
    """Tokens per step; by default enough to make the optimizer's share small, and 512 for tiny."""
    clipping: bool = True
    """Clip by the global norm of gradients, for which the optimizer has to wait."""
    master_weights: Literal["none", "fp32"] = "none"
    """fp32: the optimizer also keeps fp32 weights and moments, 16 bytes per parameter in all."""
    peers: tuple[Peer, ...] = ()
    """Also measure the same model without caps, in the same run: compiled, plain PyTorch under torch.compile on the
    device; fsdp2-offload, torch's FSDP2 with state and optimizer on the host, blocks compiled and checkpointed."""
    gpu: str | None = None
    """Simulate this device and measure nothing: h200, h100, b200, a100-sxm-80gb, rtx-5090 ... (hardware.py)."""
    explain: bool = False
    """Also print of each plan what lives where, what binds it, and what one more GiB of either memory would bring, for
    which two more plans are searched."""
    timeline: bool = False
    """Write and draw what each lane does, into the folder of --out: measured on a GPU, else simulated."""
    profile: bool = False
    """Record the steps with nsys instead; streams and ranges have the names of the plan's lanes and operations."""
    raw: Path = Path("profiles/raw")
    """Folder for the recordings of --profile."""
    warmup: int = 1
    """Steps before the recorded ones; they are long, so clocks have settled after one."""
    steps: int = 3
    """Recorded steps."""


@dataclass(frozen=True)
class StreamingCell:
    """A model and a length under two caps; the fields are columns."""

    device: str
    simulated_device: str
    """Name of the device, if nothing is measured."""
    size: str
    context_length: int
    device_gib: float
    """0 of a peer, which has no caps; likewise the next."""
    host_gib: float
    order: str
    chunk: int
    """0 for what is fastest; likewise the next."""
    tokens_per_step: int
    clipping: bool
    master: str
    warmup: int
    steps: int
    seed: int
    peer: str = ""
    """What runs instead of a streamed step."""

    @property
    def variant(self) -> str:
        return "simulated" if self.simulated_device else self.peer or "measured"

    @property
    def config(self) -> ModelConfig:
        return replace(resolve_size(self.size), max_context_length=None).at_context(self.context_length)

    def __str__(self) -> str:
        if self.peer:
            return f"{self.size} {self.context_length:,} {self.peer}"
        return f"{self.size} {self.context_length:,} within {self.device_gib:g} / {self.host_gib:g} GiB {self.order}"


def hardware_named(name: str) -> Hardware:
    """By its name in ``hardware.py``, whatever the case and with hyphens for spaces; or by what its name begins with.

    Raises:
        ValueError: no such device, or it has no published host link.
    """
    key = name.lower().replace("-", " ")
    found = [hardware for hardware in HARDWARE if hardware.host_link_bytes_per_s is not None]
    for hardware in found:
        if hardware.name.lower() == key:
            return hardware
    for hardware in found:
        if hardware.name.lower().startswith(key):
            return hardware
    known = [hardware.name.lower().replace(" ", "-") for hardware in found]
    hint = did_you_mean(name.lower(), known, most=3)
    raise ValueError(f"--gpu {name}: {hint}known are {', '.join(known)}")


_DEFAULTS = {
    "context_length": (8192,),
    "device_gib": (24.0,),
    "host_gib": (75.0,),
    "chunk": 0,
    "tokens_per_step": 0,
}
_TINY = {
    "context_length": (64,),
    "device_gib": (0.001, 0.002),
    "host_gib": (0.001,),
    "chunk": 32,
    "tokens_per_step": 512,
}


_WITH_MASTERS = {"host_gib": (140.0,)}
_TINY_WITH_MASTERS = {"device_gib": (0.001, 0.003), "host_gib": (0.002,)}


def make_cells(options: Options) -> list[StreamingCell]:
    """The grid; raises ValueError for a value that no cell can have."""
    for name in _DEFAULTS:
        given = getattr(options, name)
        for value in given if isinstance(given, tuple) else () if given is None else (given,):
            if not 0 < value < math.inf:
                raise ValueError(f"{flag(name)} must be positive and finite, got {value:g}")
    if options.timeline and options.out is None:
        raise ValueError("--timeline draws in the folder of --out, which is not given")
    simulated = hardware_named(options.gpu).name if options.gpu else ""
    if options.peers and (simulated or options.profile):
        raise ValueError(f"--peers {options.peers[0]} is measured: --gpu and --profile go without")
    cells = []
    for size in options.size:
        name = resolve_size(size).name
        of_size: dict[str, Any] = {
            key: value if (given := getattr(options, key)) is None else given
            for key, value in _defaults(name, options.master_weights).items()
        }
        sets = {key: value for key, value in of_size.items() if isinstance(value, tuple)} | {"order": options.order}
        own = {key: value for key, value in of_size.items() if key not in sets}
        own |= {"size": name, "simulated_device": simulated, "peer": "", "master": options.master_weights}
        for length in of_size["context_length"]:
            _check_tokens(length, of_size["chunk"], of_size["tokens_per_step"])
        cells += [
            cell_of(StreamingCell, options, **own, **dict(zip(sets, values, strict=True)))
            for values in itertools.product(*sets.values())
        ]
        uncapped = own | {"device_gib": 0.0, "host_gib": 0.0, "order": "auto", "chunk": 0, "clipping": False}
        cells += [
            cell_of(StreamingCell, options, **uncapped | {"context_length": length, "peer": peer})
            for length, peer in itertools.product(of_size["context_length"], options.peers)
        ]
    return cells


def _defaults(size: str, master_weights: str) -> dict[str, Any]:
    defaults, with_masters = (_TINY, _TINY_WITH_MASTERS) if size == "tiny" else (_DEFAULTS, _WITH_MASTERS)
    return defaults | (with_masters if master_weights == "fp32" else {})


def _check_tokens(context_length: int, chunk: int, tokens_per_step: int) -> None:
    """Raise ValueError unless steps are of whole sequences, and these of whole chunks or the other way round."""
    round_tokens = max(context_length, chunk)
    if chunk and round_tokens % min(context_length, chunk):
        raise ValueError(f"--chunk {chunk}: neither divides sequences of {context_length} tokens nor holds whole ones")
    if tokens_per_step % round_tokens:
        raise ValueError(f"--tokens-per-step {tokens_per_step} is no multiple of {round_tokens}, the least of a round")
