"""A run's numbers in TensorBoard and in Weights & Biases: further sinks of its log, for who has them.

    RunLog(LogFile.open(folder / LOG, resume=False), TensorBoard(folder), WeightsAndBiases(folder, "my-project"))
    trackers_of(options, first_step)                       # those that a run's options ask for

Each is an extra: ``uv sync --extra tensorboard`` or ``--extra wandb``.
"""

import uuid
from pathlib import Path

from cs336_systems.pretraining.options import TrainOptions
from cs336_systems.pretraining.run_log import Sink
from cs336_systems.pretraining.run_records import Evaluation, GpuState, Options, Record, Step

WANDB_ID = "wandb_id.txt"
"""In a run's folder: which run at Weights & Biases it is."""


def scalars(record: Record) -> dict[str, float]:
    """What of a record is drawn, by names such as ``train/loss``; nothing of most kinds."""
    values: dict[str, float | None] = {}
    match record:
        case Step():
            values = {f"train/{name}": getattr(record, name) for name in ("loss", "norm", "learning_rate", "seconds")}
            values["train/tokens_per_s"] = record.tokens / record.seconds
        case Evaluation():
            values = {"evaluation/loss": record.loss}
        case GpuState():
            names = ("sm_mhz", "power_w", "temperature_c", "memory_used_bytes")
            values = {f"gpu/{name}": getattr(record, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def trackers_of(options: TrainOptions, first_step: int) -> list[Sink]:
    """What ``--tensorboard`` and ``--wandb`` ask for, for a run that begins or goes on at this step.

    Raises:
        ValueError: one is not installed, or nobody is logged in.
    """
    sinks: list[Sink] = []
    if options.tensorboard:
        sinks.append(TensorBoard(options.out, first_step))
    if options.wandb is not None:
        sinks.append(WeightsAndBiases(options.out, options.wandb, resume=first_step > 0))
    return sinks


class TensorBoard:
    """Event files in the run's folder.

    Args:
        first_step: where the run resumes; what was drawn of later steps is taken back.

    Raises:
        ValueError: TensorBoard is not installed.
    """

    def __init__(self, folder: Path, first_step: int = 0) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ValueError("drawing with TensorBoard needs it: uv sync --extra tensorboard") from None
        self._writer = SummaryWriter(str(folder), purge_step=first_step or None)

    def write(self, record: Record) -> None:
        for name, value in scalars(record).items():
            self._writer.add_scalar(name, value, vars(record)["step"], record.at)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of a project, by the name of its folder; continued if the folder's run is.

    Raises:
        ValueError: the client is not installed, or nobody is logged in.
    """

    def __init__(self, folder: Path, project: str, *, resume: bool = False) -> None:
        try:
            import wandb
        except ImportError:
            raise ValueError("drawing with Weights & Biases needs its client: uv sync --extra wandb") from None
        folder.mkdir(parents=True, exist_ok=True)
        known = folder / WANDB_ID
        run_id = known.read_text().strip() if resume and known.exists() else uuid.uuid4().hex
        try:
            self._run = wandb.init(project=project, name=folder.name, dir=str(folder), id=run_id, resume="allow")
        except wandb.Error as error:
            raise ValueError(f"Weights & Biases: {error}") from None
        known.write_text(run_id + "\n")
        self._run.define_metric("*", step_metric="step")  # a later record may be of an earlier step

    def write(self, record: Record) -> None:
        if isinstance(record, Options):
            self._run.config.update(dict(record.options), allow_val_change=True)
        elif values := scalars(record):
            self._run.log({"step": vars(record)["step"]} | values)

    def close(self) -> None:
        self._run.finish()
