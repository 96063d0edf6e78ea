"""One training step, put together from a ``TrainingCase``: model, precision, wrapper, optimizer, loss.

    case = TrainingCase(size="tiny", batch_size=4, context_length=128)
    step = assemble(case)
    loss = step(*random_batch(case))      # one whole step; the loss before the update, a scalar on the device

``assemble.py`` fixes the order in which the parts are put together, for one rank and for many.
"""

from cs336_systems.case import TrainingCase
from cs336_systems.training.assemble import assemble, check_supported, random_batch
from cs336_systems.training.optimizer import AdamW
from cs336_systems.training.step import TrainStep, cross_entropy

__all__ = ["AdamW", "TrainStep", "TrainingCase", "assemble", "check_supported", "cross_entropy", "random_batch"]
