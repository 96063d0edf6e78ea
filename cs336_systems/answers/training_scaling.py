"""What ranks make of whole runs, as a table."""

import pandas as pd

from cs336_systems.answers.committed import NotMeasured
from cs336_systems.experiments.training.scaling import APART, WAYS, over_one_rank
from cs336_systems.report.results import MISSING
from cs336_systems.report.tables import Table


def scaling_table(rows: pd.DataFrame) -> Table:
    """The lines of ``over_one_rank``, and ZeRO-1 over ranks that send nothing.

    Raises:
        NotMeasured: no command has measured one rank and several.
    """
    lines = over_one_rank(rows)
    if lines.empty:
        raise NotMeasured("training on several ranks beside one")
    ratios = lines[[*WAYS]].assign(**{"ZeRO-1 over apart": lines["ZeRO-1"] / lines[APART]})
    shown = ratios.map(lambda ratio: MISSING if pd.isna(ratio) else f"{ratio:.3f}")
    frame = pd.concat([lines[["size", "products", "ranks"]], shown, lines["commit"]], axis=1)
    return Table("Tokens/s over those of one rank in the same command.", frame)
