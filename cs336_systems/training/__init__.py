"""Loss, optimizer, precision, assembling, and one training step."""

from cs336_systems.training.assemble import TrainingSetup, assemble, unsupported_attention
from cs336_systems.training.loss import cross_entropy
from cs336_systems.training.optimizer import AdamW
from cs336_systems.training.step import TrainStep

__all__ = ["AdamW", "TrainStep", "TrainingSetup", "assemble", "cross_entropy", "unsupported_attention"]
