"""README.ipynb, without running it (tests/test_demo_run.py runs it)."""

import ast
import shlex
from pathlib import Path

import nbformat
import pytest
import torch

from ci.check_notebook import PARAMETERS, problems_before
from tests.policies.test_loading import STATS
from tests.tiny import make_config, make_policy
from vla_finetuning.options.command_line import parse_args
from vla_finetuning.policies.pipelines import make_processors
from vla_finetuning.policies.saving import save_pretrained

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "README.ipynb"
MAX_CELL_LINES = 20


@pytest.fixture(scope="module")
def book():
    return nbformat.read(NOTEBOOK, as_version=4)


def parsed(cell):
    """A code cell as Python; IPython's magics say how to draw and are left out."""
    return ast.parse("\n".join(line for line in cell.source.splitlines() if not line.startswith("%")))


def code_cells(book):
    return [cell for cell in book.cells if cell.cell_type == "code"]


def test_notebook_has_parameters_and_figures(book):
    nbformat.validate(book)
    assert problems_before(book) == []


def test_notebook_defines_no_functions(book):
    defining = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda
    for cell in code_cells(book):
        definitions = [node for node in ast.walk(parsed(cell)) if isinstance(node, defining)]
        assert not definitions, f"cell {cell.id} defines something; that belongs into a module"
        assert len(cell.source.splitlines()) <= MAX_CELL_LINES, f"cell {cell.id} is long"


def test_notebook_parameters_reach_the_program(book):
    (cell,) = (cell for cell in book.cells if "parameters" in cell.metadata.get("tags", []))
    values = {node.targets[0].id: ast.literal_eval(node.value) for node in parsed(cell).body}
    assert values.keys() >= PARAMETERS and values["preset"] == "demo"
    # Every one of them reaches the program.
    (run,) = (cell for cell in book.cells if cell.id == "run")
    chosen = {"preset": "l4", "dataset": "/data/robot", "policy": "lerobot/pi05_base", "workers": "2,8"}
    chosen |= {"steps": 7, "output_dir": "/shared/run", "more": "--seed 3"}
    calls = []
    around = {"resolve": lambda config, gpus: config, "parse_args": parse_args, "shlex": shlex}
    names = chosen | around | {"gpus_found": lambda *arguments: calls.append(arguments)}
    assert chosen.keys() == values.keys()
    exec(run.source, names)
    config = names["run"]
    assert (config.preset, config.dataset.root, config.policy_path) == ("l4", "/data/robot", "lerobot/pi05_base")
    assert (config.scaling.min_workers, config.scaling.num_workers, config.steps) == (2, 8, 7)
    assert (config.output_dir, config.seed) == ("/shared/run", 3)
    assert calls == [(config.scaling, "l4")]


@pytest.mark.filterwarnings("ignore:.*to a meta parameter")
def test_notebook_loads_policy_on_lerobots_device(book, tmp_path, monkeypatch):
    """`meta` stands in for an accelerator: what is exported names no device, and LeRobot takes the best one."""
    folder = tmp_path / "pretrained_model"
    save_pretrained(make_policy(2), *make_processors(None, make_config(2), STATS), folder)
    monkeypatch.setattr("lerobot.configs.policies.auto_select_torch_device", lambda: torch.device("meta"))
    (load,) = (cell for cell in book.cells if cell.id == "load")
    names = {"output_dir": str(tmp_path), "robot": ""}
    exec(load.source, names)
    observation = {"observation.state": torch.zeros(4), "observation.images.0": torch.zeros(3, 28, 28), "task": "go"}
    tensors = [value for value in names["preprocess"](observation).values() if isinstance(value, torch.Tensor)]
    assert len(tensors) == 4
    assert {tensor.device.type for tensor in [*tensors, *names["trained"].parameters()]} == {"meta"}


def test_notebook_figures_are_tagged(book):
    for cell in code_cells(book):
        draws = "display(" in cell.source
        assert draws == ("figure" in cell.metadata.get("tags", [])), f"cell {cell.id}"
