"""Loss, optimizer, precision, the case of a step, assembling it, and the step itself."""

from cs336_systems.case import TrainingCase
from cs336_systems.training.assemble import assemble, check_supported, random_batch
from cs336_systems.training.optimizer import AdamW
from cs336_systems.training.step import TrainStep, cross_entropy

__all__ = ["AdamW", "TrainStep", "TrainingCase", "assemble", "check_supported", "cross_entropy", "random_batch"]
