"""Tokens per second of training by size: ours, transformers beside, and what llm.q says of itself."""

import pandas as pd

from cs336_systems.answers.outside import outside
from cs336_systems.config import MODEL_SIZES
from cs336_systems.experiments.training.table import fastest
from cs336_systems.report.results import MISSING
from cs336_systems.report.tables import Table, digits

_SIZES = ("qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-3b", "qwen2.5-7b")
_PEERS = {"transformers-liger": "transformers, Liger", "transformers": "transformers"}


def llmq_rates() -> dict[str, float]:
    """Tokens per second by size, as its authors give them of one H100."""
    return {size: 1000 * float(outside(f"llm.q {size}").removesuffix("k tokens/s")) for size in _SIZES}


def training_rates_table(rows: pd.DataFrame) -> Table:
    """A line for each size: our fastest run, how it ran, and the others' tokens per second, with ours over them."""
    runs = {(run["size"], run["how"]): run for run in fastest(rows).to_dict("records")}
    known, lines = llmq_rates(), []
    ours = [runs[size, "ours"] for size in MODEL_SIZES if (size, "ours") in runs]
    for run in ours:
        rate = run["tokens_per_s"]
        others = {name: runs.get((run["size"], how), {}).get("tokens_per_s") for how, name in _PEERS.items()}
        others["llm.q, one H100"] = known.get(run["size"])
        lines.append(
            {
                **{"size": run["size"], "tokens/s": f"{rate:,.0f}", "speed of light %": f"{run['speed_of_light']:.1f}"},
                **{name: f"{other:,.0f} ({rate / other:.2f})" if other else MISSING for name, other in others.items()},
                **{"peak GiB": digits(run["peak_memory"]), "predicted": digits(run["predicted_peak_memory"])},
                **{"batch": f"{run['batch_size']:g}", "tokens a step": f"{run['total_batch_tokens']:,.0f}"},
                **{"kernels": run["kernels"], "keep": run["keep"]},
            }
        )
    first, seconds = ours[0], sorted(run["seconds"] for run in ours)
    said = (
        f"{first['gpu']}, {first['dtype']} parameters, gradients, moments and products, sequences of "
        f"{first['context_length']:,}, attention {first['attention']}, {first['data']}; medians of the steps of "
        f"{' to '.join(dict.fromkeys(f'{each:g}' for each in (seconds[0], seconds[-1])))} s and more, after the first "
        "two; in brackets ours over it."
    )
    frame = pd.DataFrame(lines)
    return Table(said, frame[[name for name in frame if (frame[name] != MISSING).any()]])
