"""A run's numbers in TensorBoard and in Weights & Biases, for which a run needs an extra: tensorboard or wandb."""

import uuid
from collections.abc import Iterator
from pathlib import Path

from cs336_systems.pretraining.options import TrainOptions
from cs336_systems.pretraining.run_log import Sink
from cs336_systems.pretraining.run_records import Evaluation, GpuState, LoggedStep, Record, Session

WANDB_ID = "wandb_id.txt"
"""In a run's folder: its id at Weights & Biases."""


def trackers_of(options: TrainOptions, first_step: int) -> Iterator[Sink]:
    """The sinks that ``--tensorboard`` and ``--wandb`` ask for, for a run that begins or resumes at this step.

    Raises:
        ValueError: one is not installed, or nobody is logged in.
    """
    if options.tensorboard:
        yield TensorBoard(options.out, first_step)
    if options.wandb is not None:
        yield WeightsAndBiases(options.out, options.wandb, resume=first_step > 0)


def scalars(record: Record) -> dict[str, float]:
    """The numbers of a record that are drawn, by names such as ``train/loss``; nothing of most kinds."""
    drawn = {
        LoggedStep: ("train", ("loss", "norm", "learning_rate", "seconds")),
        Evaluation: ("evaluation", ("loss",)),
        GpuState: ("gpu", ("sm_mhz", "power_w", "temperature_c", "memory_used_bytes")),
    }
    group, names = drawn.get(type(record), ("", ()))
    values = {f"{group}/{name}": value for name in names if (value := getattr(record, name)) is not None}
    return values | ({"train/tokens_per_s": record.tokens / record.seconds} if isinstance(record, LoggedStep) else {})


class TensorBoard:
    """Event files in the run's folder; events of earlier sessions from ``first_step`` on are taken back.

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
        if isinstance(record, Session):
            self._run.config.update(dict(record.options), allow_val_change=True)
        elif values := scalars(record):
            self._run.log({"step": vars(record)["step"]} | values)

    def close(self) -> None:
        self._run.finish()
