"""Predictions of the cost calculators against measurements on several GPUs, with the error of each.

An error is prediction over measurement, less one: below zero the machine was slower, or held more, than arithmetic
said. Two predictions of time stand side by side where both can be had: from the link's datasheet, which knows no
latency and is a lower bound, and from a link fitted to other rows than the one that is predicted.

Columns of the rows are those of the ``benchmark_*.py`` that measured them.
"""

import pandas as pd

from cs336_systems.answers.committed import NotMeasured, caption, cells
from cs336_systems.config import resolve_size
from cs336_systems.costs.communication import LINKS, Link, RingCost, cost, fit
from cs336_systems.costs.fsdp import Shape, model_units
from cs336_systems.costs.sharding import step_messages
from cs336_systems.experiments.ranked import sent_mib
from cs336_systems.report.tables import Table, digits, settings_split

MIB = 2**20
DATASHEET = LINKS["nvlink4"]
"""What joins H100s and H200s of one host."""

_DDP_SETTINGS = ["size", "dtype", "batch_size", "compile", "communication_dtype"]
_FSDP_SETTINGS = ["size", "dtype", "batch_size", "context_length", "attention", "checkpoint", "compile"]

BYTES = {"bf16": 2}
"""Per element of a gradient; 4 in every other precision."""


def error(predicted: float, measured: float, places: int = 0) -> str:
    """Percent, signed."""
    return signed(100 * (predicted / measured - 1), places)


def signed(value: float, places: int) -> str:
    """With its sign, and none of its own for a zero that was rounded up to."""
    return f"{round(value, places) + 0.0:+.{places}f}"


def gpu_times(collectives: pd.DataFrame) -> pd.DataFrame:
    """Times of collectives between GPUs, the newest of each cell."""
    rows = collectives[(collectives["metric"] == "time") & (collectives["device"] == "cuda")]
    return rows.drop_duplicates(["world_size", "dtype", "collective", "size_mb"], keep="last")


def fitted_link(collectives: pd.DataFrame, world_size: int) -> Link | None:
    """The link of least error over all times of a world; None where they do not suffice."""
    times = gpu_times(collectives)
    points = [(_cost(row), row["median"] / 1e3) for _, row in times[times["world_size"] == world_size].iterrows()]
    try:
        return fit(points)
    except ValueError:
        return None


def _cost(row: pd.Series) -> RingCost:
    return cost(row["collective"], int(row["world_size"]), int(row["total_bytes"]))


def link_of(collectives: pd.DataFrame, world_size: int) -> Link:
    """The link fitted to a world; raises ``NotMeasured`` where its times do not suffice."""
    link = fitted_link(collectives, world_size)
    if link is None:
        raise NotMeasured(f"no link of {world_size} ranks can be fitted")
    return link


def best_bucket_mib(collectives: pd.DataFrame, size: str, world_size: int) -> float:
    """sqrt(s w o) with the fitted link: s all gradients, o its latency per call, w its all-reduce bandwidth."""
    link, call = link_of(collectives, world_size), cost("all_reduce", world_size, 1.0)
    overhead, bandwidth = call.steps * link.alpha_s, 1 / (call.wire_bytes * link.beta_s_per_byte)
    return (sum(gradient_sizes(size)) * bandwidth * overhead) ** 0.5 / MIB


def predicted_exposed(rung: str, bucket_mib: float = 25.0, size: str = "xl", world_size: int = 2) -> float:
    """At the datasheet's bandwidth; backward taken to be long enough to hide what it can; ms."""
    messages = rung_messages(rung, gradient_sizes(size), bucket_mib)
    return exposed_ms(rung, messages, world_size, DATASHEET, float("inf"))


def collectives_predictions(collectives: pd.DataFrame, collective: str = "all_reduce") -> Table:
    """One collective at every world and size: measured, by the datasheet, and by the ring fitted to the smallest world.

    The fitted ring predicts larger worlds without having seen them.
    """
    times = gpu_times(collectives)
    times = times[(times["collective"] == collective) & (times["dtype"] == "fp32")]
    if times.empty:
        raise NotMeasured(f"no row holds {collective} between GPUs")
    smallest = int(times["world_size"].min())
    link = fitted_link(collectives, smallest)
    lines = []
    for _, row in times.sort_values(["world_size", "size_mb"]).iterrows():
        lower = 1e3 * DATASHEET.seconds(_cost(row))
        line = {
            "collective": collective,
            "ranks": row["world_size"],
            "MB": f"{row['size_mb']:g}",
            "measured ms": digits(row["median"]),
            "datasheet ms": digits(lower),
            "its error %": error(lower, row["median"]),
        }
        if link is not None:
            ring = 1e3 * link.seconds(_cost(row))
            line |= {f"ring of {smallest} ms": digits(ring), "ring's error %": error(ring, row["median"])}
        lines.append(line)
    return Table(caption(times, ["device", "dtype"], "medians of {n} samples; MB of 1e6 bytes"), pd.DataFrame(lines))


def gradient_sizes(size: str, bytes_per_element: int = 4) -> list[int]:
    """Bytes of every gradient of the reference model, in the order of forward."""
    return [bytes_per_element * _elements(shape) for unit in model_units(resolve_size(size)) for shape in unit]


def _elements(shape: Shape) -> int:
    product = 1
    for length in shape:
        product *= length
    return product


def rung_messages(rung: str, sizes: list[int], bucket_mib: float | None) -> list[int]:
    """Bytes of each all-reduce that a rung of the ladder sends, in the order in which backward sends them."""
    backwards = sizes[::-1]
    if rung == "flat":
        return [sum(sizes)]
    if rung in ("naive", "overlapped"):
        return backwards
    messages: list[int] = []
    for size in backwards:
        if messages and bucket_mib is not None and messages[-1] + size <= bucket_mib * MIB:
            messages[-1] += size
        else:
            messages.append(size)
    return messages


def exposed_ms(rung: str, messages: list[int], world_size: int, link: Link, backward_ms: float) -> float:
    """Communication that a step waits for: all of it after backward, or what backward cannot hide.

    Overlapped rungs send while backward runs; the last message cannot begin before backward ends, and what does not
    fit beside backward remains.
    """
    each = [1e3 * link.seconds(cost("all_reduce", world_size, n_bytes)) for n_bytes in messages]
    if rung in ("naive", "flat"):
        return sum(each)
    return max(each[-1], sum(each) - backward_ms)


def ddp_predictions(rows: pd.DataFrame, collectives: pd.DataFrame) -> Table:
    """Exposed communication of every rung: predicted from the model's gradients and a link, and measured."""
    lines = []
    keys = [*_DDP_SETTINGS, "world_size", "ddp", "bucket_size_mb"]
    ran = rows[(rows["status"] == "ok") & (rows["world_size"] > 1)]
    for values, cell in cells(ran, keys):
        medians = cell.drop_duplicates("metric", keep="last").set_index("metric")["median"]
        sent = "bf16" if values["communication_dtype"] == "bf16" else values["dtype"]
        sizes = gradient_sizes(values["size"], BYTES.get(sent, 4))
        bucket = pd.to_numeric(pd.Series([values["bucket_size_mb"]]), errors="coerce").iloc[0]
        messages = rung_messages(values["ddp"], sizes, None if pd.isna(bucket) else float(bucket))
        line = {name: str(values[name]) for name in _DDP_SETTINGS}
        line |= {"ddp": values["ddp"], "bucket MiB": "" if pd.isna(bucket) else f"{bucket:g}"}
        line |= {"ranks": str(values["world_size"]), "measured exposed ms": f"{medians['exposed']:.2f}"}
        fitted = fitted_link(collectives, values["world_size"])
        for label, link in (("datasheet", DATASHEET), ("fitted ring", fitted)):
            if link is not None:
                predicted = exposed_ms(values["ddp"], messages, values["world_size"], link, medians["local_backward"])
                line[f"{label} ms"] = f"{predicted:.2f}"
        if "fitted ring ms" in line:
            line["error ms"] = signed(float(line["fitted ring ms"]) - medians["exposed"], 2)
        if (sent := _sent_mib(cell, values["world_size"])) is not None:
            predicted_mib = cost("all_reduce", values["world_size"], sum(messages)).wire_bytes / MIB
            line["sent MiB"] = digits(sent)
            line["its error %"] = error(predicted_mib, sent, 2)
        lines.append(line)
    return _table("Exposed communication; error: fitted ring less measured.", lines, _DDP_SETTINGS)


def sharded_predictions(rows: pd.DataFrame, collectives: pd.DataFrame) -> Table:
    """Each way to hold optimizer state: state per rank and the optimizer's phase, predicted and measured.

    The optimizer's phase of one rank is the replicated one over the world, as each updates its part, and then the
    message in which parameters travel; the ring fitted to the measured collectives says how long, else the datasheet.
    """
    names = {"torch-zero": "owned"}
    keys = ["size", "dtype", "world_size", "optimizer", "bucket_size_mb"]
    lines = []
    for values, group in cells(rows[rows["status"] == "ok"], keys):
        medians = group.groupby(["sharding", "metric"], sort=False)["median"].median().unstack()
        world_size = int(values["world_size"])
        link = fitted_link(collectives, world_size) or DATASHEET
        n_bytes = sum(gradient_sizes(values["size"], BYTES.get(values["dtype"], 4)))
        for sharding, found in medians.iterrows():
            form = names.get(str(sharding), str(sharding))
            state, predicted_state = found["after_step_optimizer_state"], found["predicted_optimizer_state"]
            line = {
                "how": sharding,
                "size": values["size"],
                "dtype": values["dtype"],
                "ranks": world_size,
                "state GiB": digits(state),
                "predicted GiB": digits(predicted_state),
                "error %": error(predicted_state, state, 2),
                "optimizer ms": digits(found["optimizer"]),
            }
            if "replicated" in medians.index:
                alone = float(medians["optimizer"]["replicated"])
                parameters = [
                    total for name, total in step_messages(form, n_bytes).items() if name in ("broadcast", "all_gather")
                ]
                kind = "broadcast" if form == "owned" else "all_gather"
                sending = sum(1e3 * link.seconds(cost(kind, world_size, total)) for total in parameters)
                share = 1 if form == "replicated" else world_size
                predicted = alone / share + sending
                line |= {"predicted ms": digits(predicted), "its error %": error(predicted, found["optimizer"])}
            lines.append(line)
    return Table("", pd.DataFrame(lines))


def fsdp_predictions(rows: pd.DataFrame, collectives: pd.DataFrame) -> Table:
    """Of each cell of ours: states, bytes sent, and the gather of one block beside a block's forward.

    A gather of the next block that takes no longer than the forward of this one hides behind it.
    """
    lines = []
    keys = [*_FSDP_SETTINGS, "world_size", "prefetch"]
    ours = rows[(rows["status"] == "ok") & (rows["fsdp"] == "ours") & (rows["world_size"] > 1)]
    for values, cell in cells(ours, keys):
        medians = cell.groupby("metric")["median"].median()
        config, world_size = resolve_size(values["size"]), int(values["world_size"])
        link = fitted_link(collectives, world_size) or DATASHEET
        n_bytes = (4 if values["dtype"] == "fp32" else 2) * config.n_block_parameters
        gather_ms = 1e3 * link.seconds(cost("all_gather", world_size, n_bytes))
        line = {name: str(values[name]) for name in _FSDP_SETTINGS}
        line |= {
            "ahead": f"{float(values['prefetch']):g}",
            "ranks": str(world_size),
            "states GiB": digits(medians["state"]),
            "predicted GiB": digits(medians["predicted_state"]),
            "error %": error(medians["predicted_state"], medians["state"], 2),
        }
        if (sent := _sent_mib(cell, world_size)) is not None:
            line["sent MiB"] = digits(sent)
            if "predicted_sent" in medians:
                line["sent, error %"] = error(medians["predicted_sent"], sent, 2)
        line |= {
            "gather of a block ms": f"{gather_ms:.2f}",
            "forward of a block ms": f"{medians['forward'] / config.n_layers:.2f}",
        }
        for label, metric, form in (("late", "late_gathers", ".0f"), ("waited ms", "gather_wait", ".2f")):
            line[label] = format(medians[metric], form) if metric in medians else "–"
        lines.append(line)
    return _table("Gathers by the fitted ring.", lines, _FSDP_SETTINGS)


def _sent_mib(cell: pd.DataFrame, world_size: int) -> float | None:
    by_metric = cell.drop_duplicates("metric", keep="last").set_index("metric")
    return sent_mib({str(name): row for name, row in by_metric.iterrows()}, world_size)


def _table(caption: str, lines: list[dict[str, str]], settings: list[str]) -> Table:
    """Settings that all lines share in the caption, the others as columns."""
    if not lines:
        raise NotMeasured("no row of several GPUs holds a prediction's counterpart")
    frame = pd.DataFrame(lines)
    shared, varying = settings_split(frame, settings)
    shown = [*varying, *(column for column in frame.columns if column not in settings)]
    names = {"communication_dtype": "sent as", "batch_size": "batch", "context_length": "context"}
    return Table(f"{caption} {shared}".strip(), frame[shown].fillna("–").rename(columns=names))
