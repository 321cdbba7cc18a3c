"""The trainer that starts a run's workers."""

from ray.train.torch import TorchTrainer
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback

from vla_finetuning.training.fitting import Trainer


def callbacks_of(trainer_class):
    return {type(callback) for callback in trainer_class(lambda config: None)._create_default_callbacks()}


def test_no_cleaner_ends_a_healthy_attempt():
    """Ray's own trainer has the cleaner that takes a controller for dead while the State API starts; ours all else."""
    rays = callbacks_of(TorchTrainer)
    assert PlacementGroupCleanerCallback in rays
    assert callbacks_of(Trainer) == rays - {PlacementGroupCleanerCallback} and len(rays) > 2
