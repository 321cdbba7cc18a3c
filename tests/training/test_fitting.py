"""The trainer of a run's workers against Ray's."""

from ray.train.torch import TorchTrainer
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback

from vla_finetuning.training.fitting import Trainer


def callbacks_of(trainer_class):
    return {type(callback) for callback in trainer_class(lambda config: None)._create_default_callbacks()}


def test_trainer_has_rays_callbacks_without_the_placement_group_cleaner():
    """The cleaner takes a controller for dead while the State API starts."""
    rays = callbacks_of(TorchTrainer)
    assert PlacementGroupCleanerCallback in rays
    assert callbacks_of(Trainer) == rays - {PlacementGroupCleanerCallback} and len(rays) > 2
