"""A plan under memory caps as tables: what lies on the device and on the host, and what each lane does.

for table in plan_tables(choice): console.print(table.rich(width))
"""

import pandas as pd

from cs336_systems.hardware import GIB
from cs336_systems.report.tables import Table
from cs336_systems.streaming.choice import Choice
from cs336_systems.streaming.explain import seconds_by_kind

_LANES = {"in": "copies to the device", "compute": "kernels", "out": "copies to the host"}


def plan_tables(choice: Choice) -> list[Table]:
    """Memory, then time."""
    return [memory_table(choice), lanes_table(choice)]


def memory_table(choice: Choice) -> Table:
    """A line for each ring of slots and region of places, and for what lies beside them."""
    schedule, caps = choice.schedule, choice.caps
    names = list(dict.fromkeys((*choice.device_parts, *choice.host_parts)))
    lines = []
    for name in names:
        ring, region = schedule.rings.get(name), schedule.regions.get(name)
        lines.append(
            {
                "what": name,
                "slots": f"{ring.slots}" if ring else "",
                "device GiB": _gib(choice.device_parts.get(name)),
                "places": f"{region.places}" if region else "",
                "host GiB": _gib(choice.host_parts.get(name)),
            }
        )
    device, host = sum(choice.device_parts.values()), sum(choice.host_parts.values())
    lines.append({"what": "all", "slots": "", "device GiB": _gib(device), "places": "", "host GiB": _gib(host)})
    caption = f"caps: {caps.device / GIB:g} GiB on the device, {caps.host / GIB:g} GiB on the host"
    return Table(caption, pd.DataFrame(lines))


def lanes_table(choice: Choice) -> Table:
    """A line for each lane and each kind of kernel."""
    times, operations = choice.times, choice.schedule.operations
    lines = []
    for lane, name in _LANES.items():
        n_bytes = sum(operation.n_bytes for operation in operations if operation.lane == lane)
        lines.append(
            {
                "what": name,
                "s": f"{times.busy[lane]:.2f}",
                "share of the step": f"{100 * times.busy[lane] / times.span:.1f} %",
                "GiB": _gib(n_bytes or None),
                "kernels waited, s": f"{times.waited_for[lane]:.2f}" if lane != "compute" else "",
            }
        )
    for kind, seconds in sorted(seconds_by_kind(choice).items(), key=lambda pair: -pair[1]):
        share = f"{100 * seconds / times.span:.1f} %"
        lines.append({"what": f"  {kind}", "s": f"{seconds:.2f}", "share of the step": share, "GiB": ""})
    frame = pd.DataFrame(lines).fillna("")
    rates = f"{choice.tokens_per_s:,.0f} tokens/s, {choice.model_flops_per_s / 1e12:.0f} TFLOP/s of the model"
    return Table(f"one step of {times.span:.2f} s: {rates}", frame)


def _gib(n_bytes: int | None) -> str:
    return "" if n_bytes is None else f"{n_bytes / GIB:.2f}"
