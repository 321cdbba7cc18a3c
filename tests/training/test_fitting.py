"""The trainer of a run's workers against Ray's."""

from types import SimpleNamespace
from unittest.mock import MagicMock

from ray.train.torch import TorchTrainer
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback

from vla_finetuning.training import fitting
from vla_finetuning.training.fitting import Trainer


def callbacks_of(trainer_class):
    return {type(callback) for callback in trainer_class(lambda config: None)._create_default_callbacks()}


def test_trainer_has_rays_callbacks_without_the_placement_group_cleaner():
    """The cleaner takes a controller for dead while the State API starts."""
    rays = callbacks_of(TorchTrainer)
    assert PlacementGroupCleanerCallback in rays
    assert callbacks_of(Trainer) == rays - {PlacementGroupCleanerCallback} and len(rays) > 2


def test_a_recovered_checkpoint_is_compared_with_the_statistics_of_the_run(monkeypatch):
    calls = MagicMock()
    for name in ("cluster", "with_stats", "recover", "check_run_statistics", "fit_to_rows"):
        monkeypatch.setattr(fitting, name, getattr(calls, name))
    fitting.on_cluster(SimpleNamespace(job=MagicMock(), rows=MagicMock(metas=[]), policy=MagicMock(), gpu_bytes=0))
    order = [call[0] for call in calls.mock_calls]
    assert order.index("recover") < order.index("check_run_statistics")
