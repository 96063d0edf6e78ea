"""A plan of ``pretraining/card_plan.py`` on the console and as a figure: ``--print-plan`` of commands that train.

    code = print_plans([options], asked, "train.py", ["zero"])  # tables, a sentence on fp8, and one JSON object

Nothing is run: all numbers are predictions.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cs336_systems.case import RECIPE
from cs336_systems.config import FP8_QUANTUM, ModelConfig
from cs336_systems.costs.parallelism.forms import GPUS_PER_HOST, NETWORK_BYTES_PER_S
from cs336_systems.costs.parallelism.seconds import by_class
from cs336_systems.costs.speed_of_light import speed_of_light
from cs336_systems.declared import as_typed, flag
from cs336_systems.hardware import DATA_CENTRE, GIB, find_hardware, hardware_named
from cs336_systems.pretraining.card_plan import TRIED, CardPlan, Way
from cs336_systems.pretraining.options import TrainOptions
from cs336_systems.pretraining.plan_options import PRINT_PLAN, Asked
from cs336_systems.report.command_line import flags_in, n_gpus
from cs336_systems.report.run_console import memory_table
from cs336_systems.report.tables import Table, show

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_BAR = 30
"""Length in characters of the bar that stands for a whole step."""
_ERRORS = {"H100 SXM": 0.05, "H200": 0.05, "RTX 3090": 0.12, "RTX PRO 6000 Blackwell": 0.12}
"""By GPU, the relative error that nine of ten predictions stayed below: for this suite's own steps on an H100 and an
H200, for published ones on others (profiles/your-card.md; ``scripts/parallelism.py cards``)."""
_UNFITTED, _SEVERAL_GPUS = 0.2, 4
"""The same error for GPUs on which nothing was fitted and for runs on more than ``_SEVERAL_GPUS`` GPUs."""
_HOSTS = f"Hosts are taken to have {GPUS_PER_HOST} GPUs, each with {8 * NETWORK_BYTES_PER_S / 1e9:g} Gbit/s to others."
_MULTI_NODE = "TORCHRUN='uv run torchrun' scripts/launch/multi_node.sh"
_PLANNED = {*TRIED, *RECIPE[:1], "init", "size", "context_length", "total_batch_tokens", "accumulate", "choose_fastest"}
_PLANNED |= {"device", "device_gib", "host_gib", "chunk"}
"""Options of train.py for which a plan has its own values."""
_FP8_GAIN = 0.03
"""The least speed-up for which fp8 is recommended, as it loses accuracy."""


def plan_asked(
    arguments: Sequence[str],
    runs: Callable[[list[str]], Sequence[TrainOptions]],
    command: str,
    typed: Collection[str] | None = None,
) -> int:
    """Print plans for the runs that the arguments describe; return the exit code.

    The arguments also hold the plan's own options. Options of ``TRIED`` that they give keep their values.

    Args:
        typed: the options typed by the user; None for all. Others, from a file, count as given if not the default.

    Raises:
        ValueError: an option is invalid, or nothing fits.
    """
    asked, rest = Asked.taken_from(arguments)
    typed = flags_in(rest) if typed is None else typed
    if not asked.gpu:
        asked = replace(asked, gpu=_card_here())
    if asked.run_tokens is not None and "--steps" in flags_in(rest):
        raise ValueError(
            f"--steps and --run-tokens both say how long the run is: give one, got {asked.run_tokens:.3g} tokens"
        )
    planned, said = runs(rest), flags_in(rest)
    given = [name for name in TRIED if flag(name) in said and (flag(name) in typed or _differs(planned, name))]
    return print_plans(planned, asked, command, given)


def _differs(runs: Sequence[TrainOptions], name: str) -> bool:
    """Return whether one of the runs has another value than the default."""
    return any(getattr(run, name) != getattr(TrainOptions, name) for run in runs)


def _card_here() -> str:
    """Return the name of this machine's GPU.

    Raises:
        ValueError: there is no GPU, or no peaks of it are on record.
    """
    if not n_gpus():
        raise ValueError(f"{PRINT_PLAN} needs --gpu where there is none: a name, such as rtx-4090, or its figures")
    import torch

    name = torch.cuda.get_device_name()
    if (hardware := find_hardware(name)) is None:
        raise ValueError(
            f"no peaks are on record for {name}: describe it, as in --gpu peak=165,bandwidth=1008,memory=24"
        )
    return hardware.name


def print_plans(runs: Sequence[TrainOptions], asked: Asked, command: str, given: Sequence[str]) -> int:
    """Print the plans of some runs, save the last one's figure if requested, and end with one JSON object.

    Raises:
        ValueError: as for ``CardPlan.of``; nothing fits; the GPUs are no whole number of hosts; a run's length is given
            in epochs; or the figure's file is no PNG.
    """
    if asked.picture is not None:
        from cs336_systems.report.figures import check_png, save

        check_png(Path(asked.picture))
    if asked.gpus > GPUS_PER_HOST and asked.gpus % GPUS_PER_HOST:
        raise ValueError(f"--gpus {asked.gpus} is no multiple of {GPUS_PER_HOST}, the GPUs of a host")
    summary: dict[str, Any] = {"command": command, "gpu": hardware_named(asked.gpu).name, "gpus": asked.gpus}
    for options in runs:
        if options.epochs is not None:
            raise ValueError(f"{PRINT_PLAN} reads no data: say --run-tokens or --steps instead of --epochs")
        plan = CardPlan.of(options, asked, given, _config_of_weights(options.init))
        if plan.may_stream:
            print("planning layers that stream, if need be: up to two minutes", file=sys.stderr, flush=True)
        for each in (ways_table(plan), memory_table(segments(plan)), classes_table(plan)):
            show(each, "auto")
            print()
        print(*sentences(plan), sep="\n")
        summary[plan.config.name] = {name: _figures(plan, way) for name, way in plan.best.items()}
        if asked.picture is not None:
            save(classes_figure(plan), Path(asked.picture))
            print(f"{asked.picture}: the time of a step by class of kernel")
    print(json.dumps(summary))
    return 0


def _config_of_weights(folder: Path | None) -> ModelConfig | None:
    if folder is None:
        return None
    from cs336_systems.model.hf_weights import config_from_hf

    return config_from_hf(folder)


def _figures(plan: CardPlan, way: Way) -> dict[str, Any]:
    figures = {"how": str(way), "tokens_per_s": way.tokens_per_s, "step_s": _step_seconds(plan, way)}
    figures |= {"device_gib": way.device_bytes / GIB, "host_gib": way.host_bytes * plan.asked.gpus / GIB}
    return figures | run_cost(plan, way) | {"error": relative_error(plan)}


def run_tokens(plan: CardPlan) -> float:
    """Return the tokens of the whole run: --run-tokens, else those of --steps of the fastest way, else a billion."""
    if plan.asked.run_tokens is not None:
        return plan.asked.run_tokens
    if plan.own.steps is None:
        return 1e9
    streamed = plan.fastest.streamed
    return plan.own.steps * (streamed.plan.tokens if streamed else plan.tokens_per_step)


def run_cost(plan: CardPlan, way: Way) -> dict[str, float | None]:
    """Return the ``hours``, ``kwh`` and ``price`` of the whole run.

    Energy counts only the GPUs, at full power; it is None if their power is unknown, and the price if none is given.
    """
    hours = run_tokens(plan) / way.tokens_per_s / 3600
    watts, each = plan.hardware.watts, plan.asked.price_per_gpu_hour
    kwh = None if watts is None else hours * plan.asked.gpus * watts / 1000
    return {"hours": hours, "kwh": kwh, "price": None if each is None else each * plan.asked.gpus * hours}


def relative_error(plan: CardPlan) -> float:
    """Return the relative error below which nine of ten predictions for this GPU stay."""
    return _UNFITTED if plan.asked.gpus > _SEVERAL_GPUS else _ERRORS.get(plan.hardware.name, _UNFITTED)


def _step_seconds(plan: CardPlan, way: Way) -> float:
    return way.streamed.times.span if way.streamed else plan.tokens_per_step / way.tokens_per_s


def ways_table(plan: CardPlan) -> Table:
    """Return a table of the run as its options describe it and of the fastest ways, in tokens/s of all GPUs."""
    import pandas as pd

    lines = []
    own = None if plan.own.choose_fastest else plan.as_asked
    for name, way in (*([("as asked", own)] if own else []), *plan.best.items()):
        fits = way.device_bytes <= plan.device_bytes and way.host_bytes <= max(plan.host_bytes, 0)
        fits = fits or way.streamed is not None
        spare = (plan.device_bytes - way.device_bytes) / GIB
        low, high = (way.tokens_per_s * (1 + sign * relative_error(plan)) for sign in (-1, 1))
        dtype = "fp8" if way.recipe.quantized else "bf16"
        how: dict[str, Any] = {"block_dtype": dtype, "n_devices": plan.asked.gpus}
        light = speed_of_light(plan.config, plan.length, plan.hardware, **how).share(way.tokens_per_s)
        hours, kwh, price = run_cost(plan, way).values()
        assert hours is not None
        lines.append(
            {
                "way": name,
                "fits": f"{spare:.1f} GiB spare"
                if fits
                else f"no, {-spare:.1f} GiB short"
                if spare < 0
                else "host short",
                "tokens/s": f"{way.tokens_per_s:,.0f}",
                "from - to": f"{low:,.0f} - {high:,.0f}",
                "step s": f"{_step_seconds(plan, way):.3g}",
                "light %": "" if light is None else f"{100 * light:.1f}",
                "days": f"{hours / 24:,.2f}",
                "kWh": "" if kwh is None else _amount(kwh),
                **({} if price is None else {"price": _amount(price)}),
                "how": str(way),
            }
        )
    cards = f"{plan.asked.gpus} x {plan.hardware.name}" if plan.asked.gpus > 1 else plan.hardware.name
    settings = [f"sequences of {plan.length:,}"]
    if any(way.streamed is None for way in plan.best.values()):  # a streamed step has as many tokens as is fastest
        settings.append(f"{plan.tokens_per_step:,} tokens a step")
    steps = [] if plan.own.steps is None else [f"{plan.own.steps:,} steps"]
    settings += [*steps, f"{run_tokens(plan):.3g} tokens in all"]
    caption = f"{plan.config.name} on {cards}, {', '.join(settings)}: predicted, nothing was run"
    notes = {"light %": "share of the speed of light", "kWh": "of the cards alone, at their full power"}
    return Table(caption, pd.DataFrame(lines), notes, {"how": 0, "tokens/s": 0})


def _amount(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.2f}"


def segments(plan: CardPlan) -> dict[str, int]:
    """Return the bytes of one GPU by segment for the fastest way, and the bytes on the host."""
    way = plan.fastest
    found = {name: n_bytes for name, n_bytes in way.device_parts.items() if n_bytes}
    found |= {"in all": way.device_bytes, "tensors may take": int(plan.device_bytes)}
    return found | ({"on the host, all ranks": way.host_bytes * plan.asked.gpus} if way.host_bytes else {})


def seconds_by_class(plan: CardPlan, way: Way) -> dict[str, float]:
    if way.streamed is not None:
        return {"kernels": way.seconds.compute, "waiting for copies": way.seconds.waiting}
    how = plan.step_settings(way.recipe, way.offload)
    return by_class(plan.config, plan.length, way.layout, plan.hardware, **how)


def classes_table(plan: CardPlan) -> Table:
    """Return a table of the fastest way's seconds per step by class of kernel, with bars."""
    seconds = seconds_by_class(plan, plan.fastest)
    whole = sum(seconds.values())
    lines = [
        (name, f"{each:.3g}", f"{100 * each / whole:.1f}", "#" * round(_BAR * each / whole))
        for name, each in seconds.items()
    ]
    return Table.of("Time of its step by class of kernel", ("class", "s", "%", "share"), lines)


def sentences(plan: CardPlan) -> list[str]:
    """Return sentences: the fastest way's command, whether fp8 pays, assumptions, and the prediction's error."""
    error = f"{100 * relative_error(plan):.0f} %"
    fitted = "nothing was fitted on this card"
    if plan.hardware.name in _ERRORS:
        steps = "this suite's own steps on it" if plan.hardware.may_be_hopper else "published steps of this card"
        fitted = f"nine of ten of {steps} were that near"
    if plan.asked.gpus > _SEVERAL_GPUS:
        fitted = "so near were published steps of others on 8 to 16,384 H100s"
        fitted += "" if plan.hardware.name == "H100 SXM" else "; nothing was fitted on so many of this card"
    untried = plan.may_stream and not any(way.streamed for way in plan.best.values())
    limits = (
        f"train.py --device-gib {plan.device_bytes / GIB:.5g} with --host-gib plans layers that stream, which may be "
        "faster."
    )
    fastest = "Fastest without streaming" if untried else "Fastest"
    return [
        f"{fastest}: {launcher(plan.asked.gpus)} {train_arguments(plan, plan.fastest)}",
        *([limits] if untried else []),
        fp8_pays(plan),
        *attention_assumed(plan),
        f"The range is {error} each way: {fitted}.",
        *([_HOSTS] if plan.asked.gpus > GPUS_PER_HOST else []),
    ]


def launcher(gpus: int) -> str:
    """Return the words that start train.py: on one host of eight GPUs, or on each of several."""
    if gpus == 1:
        return "uv run scripts/train.py"
    if gpus <= GPUS_PER_HOST:
        return f"uv run torchrun --nproc-per-node {gpus} scripts/train.py"
    nodes = f"NNODES={gpus // GPUS_PER_HOST} {_MULTI_NODE}"
    return f"on each host, with what scripts/launch/multi_node.sh says: {nodes} scripts/train.py"


def attention_assumed(plan: CardPlan) -> list[str]:
    """Return a sentence if the run will not use the attention kernel that the prediction assumes."""
    if (plan.hardware.kind or DATA_CENTRE) != DATA_CENTRE:
        return []
    hopper, own = "The prediction is of --attention hopper", plan.own
    if not plan.hardware.is_hopper:
        return [f"{hopper}, which runs on H100 and H200 only, as if {plan.hardware.name} had a kernel as good."]
    taken = own.attention_on("cuda", hopper=True)
    if taken != "hopper":
        return [f"{hopper}, and this run has --attention {taken}."]
    return [f"{hopper} without --deterministic, which takes longer."] if own.deterministic else []


def train_arguments(plan: CardPlan, way: Way) -> str:
    """Return train.py's arguments for a way: the plan's choices, and the run's other options."""
    model = f"--init {shlex.quote(str(plan.own.init))}" if plan.own.init else f"--size {plan.own.size}"
    words = f"{model} --context-length {plan.length}"
    for each in fields(TrainOptions):
        planned = each.name in _PLANNED or (each.name in RECIPE and not way.recipe.quantized)
        if (value := getattr(plan.own, each.name)) != each.default and not planned:
            words += f" {as_typed(each.name, value)}"
    if way.streamed is None:
        return f"{words} --total-batch-tokens {plan.tokens_per_step} {way.arguments}"
    tokens = way.streamed.plan.tokens
    caps = f"--device-gib {plan.device_bytes / GIB:.5g} --host-gib {plan.asked.host_gib:g}"
    dtype = f" --matmul-dtype {way.recipe.matmul}" if way.recipe.quantized else ""
    chunk = "" if plan.own.chunk is None else f" --chunk {plan.own.chunk}"  # else the run's plan chooses them
    return f"{words} --total-batch-tokens {tokens} --batch-size 1 {caps}{chunk}{dtype}"


def fp8_pays(plan: CardPlan) -> str:
    if not plan.hardware.peak("fp8"):
        return f"fp8: {plan.hardware.name} has no products in fp8."
    if "fp8" not in plan.recipes:
        return f"fp8: its matmuls take sizes that {FP8_QUANTUM} divides, not {plan.length:,} tokens."
    best = plan.best
    fp8, bf16 = best.get("fp8") or best.get("streamed fp8"), best.get("bf16") or best.get("streamed")
    if fp8 is None or bf16 is None:
        streaming = "" if any(way.streamed for way in best.values()) else " without streaming"
        return f"fp8: only {'fp8' if fp8 else 'bf16'} fits{streaming}."
    times = fp8.tokens_per_s / bf16.tokens_per_s
    return f"fp8 {'pays' if times > 1 + _FP8_GAIN else 'does not pay'} here: {times:.2f} times as fast as bf16."


def classes_figure(plan: CardPlan) -> Figure:
    """Draw a bar for each way that fits: the time of a thousand tokens by class of kernel."""
    from cs336_systems.report.figures import OKABE_ITO, panels

    figure, (panel,) = panels(1, 1, 7.5, 1.0 + 0.6 * len(plan.best))
    colours: dict[str, str] = {}
    for row, way in enumerate(plan.best.values()):
        seconds = seconds_by_class(plan, way)
        left, unit = 0.0, 1e6 / way.tokens_per_s / sum(seconds.values())
        for name, each in seconds.items():
            label = None if name in colours else name
            colour = colours.setdefault(name, OKABE_ITO[len(colours) % len(OKABE_ITO)])
            panel.barh(row, each * unit, left=left, color=colour, label=label)
            left += each * unit
    panel.set_yticks(range(len(plan.best)), list(plan.best))
    panel.set_xlabel("ms for a thousand tokens")
    panel.set_title(f"{plan.config.name} on {plan.asked.gpus} x {plan.hardware.name}, predicted", fontsize=10)
    figure.legend(loc="outside lower center", fontsize=8, ncols=3, frameon=False)
    return figure
