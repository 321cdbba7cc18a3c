"""Unused parameters, against LeRobot's forward and autograd."""

import pytest

from diagnostics import find_unused_params
from diagnostics.find_unused_params import UnusedReport, find_unused
from tests import in_process
from tests.tiny import make_batch, make_policy
from vla_finetuning.policies import trainable
from vla_finetuning.policies.families.pi05 import PI05Loss
from vla_finetuning.policies.trainable import choose_trainable, remove_unused


def names(report, fate):
    return {parameter.name for parameter in report.of(fate)}


@pytest.fixture
def everything_trains(monkeypatch):
    """As if the project did not know PI0.5's unused parts."""
    monkeypatch.setattr(trainable, "choose_trainable", lambda policy, *_: policy.requires_grad_(True))


def test_all_trainable_parameters_are_reached(run, tmp_path):
    report = find_unused(run, batches=2)
    assert not report.unreached
    # The layers behind these start at zero in LeRobot's PI0.5, so their first gradients are zero.
    assert {name.rsplit(".", 2)[1] for name in names(report, "zero")} <= {"time_mlp_in", "time_mlp_out"}
    assert len(report.of("used")) > 30
    policy = run.policy.start()
    choose_trainable(policy, run.config.train.mode)
    remove_unused(policy)
    assert {p.name: tuple(p.shape) for p in report.parameters} == {n: p.shape for n, p in policy.named_parameters()}


def test_unused_parameters_equal_those_without_autograd_gradient(run, everything_trains):
    """LeRobot's forward computes queries of the last layer that nothing reads: their gradient is zero there."""
    report = find_unused(run, batches=2)
    policy = make_policy()
    batch, _, _ = make_batch(policy)
    policy.forward(batch)[0].backward()
    # Both have as many layers but one: compare the last by another name.
    last = {"run": _last_layer(p.name for p in report.parameters), "lerobot": _last_layer(policy.state_dict())}
    theirs = {
        n.replace(last["lerobot"], "LAST") for n, p in policy.named_parameters() if p.grad is None or not p.grad.any()
    }
    ours = {n.replace(last["run"], "LAST") for n in names(report, "unused")}
    assert ours == {n for n in theirs if not n.endswith("k_proj.bias")}
    assert not report.of("sometimes")


def _last_layer(all_names):
    language = "model.paligemma_with_expert.paligemma.model.language_model.layers."
    return language + max(n.removeprefix(language).split(".")[0] for n in all_names if n.startswith(language)) + "."


def test_parameter_unused_in_some_batches_is_reported(run, monkeypatch):
    forward, calls = PI05Loss.forward, []

    def sometimes(self, *args):
        calls.append(1)
        if len(calls) == 2:
            return self.policy.model.action_out_proj.bias.sum()
        return forward(self, *args) + 0 * self.policy.model.time_mlp_in.bias.detach().sum()

    monkeypatch.setattr(PI05Loss, "forward", sometimes)
    report = find_unused(run, batches=3)
    assert not report.of("unused")
    assert names(report, "used") == {"model.action_out_proj.bias"}
    assert {p.without_gradient for p in report.of("sometimes")} == {1}


def test_zero_gradient_is_not_reported_as_unused(run, monkeypatch, setting, capsys):
    forward = PI05Loss.forward

    def silenced(self, batch, noise, time):
        linear = self.policy.model.action_in_proj
        linear.register_forward_hook(lambda module, args, output: output * 0)
        return forward(self, batch, noise, time)

    monkeypatch.setattr(PI05Loss, "forward", silenced)
    report = find_unused(run, batches=2)
    assert {"model.action_in_proj.weight", "model.action_in_proj.bias"} <= names(report, "zero")
    assert not report.unreached
    argv = [*in_process.flags(setting), "--unused_batches=1", "--fail_if_unused", "--include_zero_grad"]
    assert find_unused_params.main(argv) == 0
    assert "  model.action_in_proj: 2 tensors, " in capsys.readouterr().out


def test_find_unused_params_command_line(setting, tmp_path, monkeypatch, capsys, everything_trains):
    monkeypatch.setenv("UNUSED_BATCHES", "1")
    argv = in_process.flags(setting, unused_json=tmp_path / "unused.json", html=tmp_path / "unused.html")
    assert find_unused_params.main(argv) == 0
    printed = capsys.readouterr().out
    head = "model.paligemma_with_expert.paligemma.lm_head"
    assert f"  {head}" in printed
    assert "trainable.choose_trainable" in printed and "reaches_all = False" in printed
    report = UnusedReport.read(tmp_path / "unused.json")
    assert report.batches == 1
    assert head in (tmp_path / "unused.html").read_text()
    assert find_unused_params.main([*argv, "--fail_if_unused"]) == 1
    capsys.readouterr()
    assert find_unused_params.main([*argv, f"--json={tmp_path / 'unused.html' / 'a.json'}"]) == 1
    assert f"{tmp_path / 'unused.html'}" in capsys.readouterr().err
    assert not (setting[0] / "run").exists()


def test_unused_parameters_are_grouped_by_largest_module():
    fates = {"a.x.w": "unused", "a.x.b": "unused", "a.y.w": "used", "b.w": "unused", "b.c.w": "unused"}
    parameters = [
        find_unused_params.Parameter(name=n, shape=[2, 3], fate=f, without_gradient=0) for n, f in fates.items()
    ]
    report = UnusedReport.model_construct(parameters=parameters)
    groups = dict(find_unused_params._groups(report, report.of("unused")))
    assert {module: len(members) for module, members in groups.items()} == {"a.x": 2, "b": 2}
    assert groups["b"][0].size == 6


def test_help_and_invalid_options(capsys):
    assert find_unused_params.main(["--help"]) == 0
    printed = capsys.readouterr().out
    assert "--unused_batches batches\n                        batches to look at (4)" in printed
    assert "--batch_size VALUE" in printed
    assert find_unused_params.main(["--unused_batches", "none"]) == 2
    assert "expected a positive number" in capsys.readouterr().err
