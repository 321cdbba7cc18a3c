import json
import re
from pathlib import Path

import pytest

from vla_finetuning.config import CONFIG_NAME, PRESETS, Config
from vla_finetuning.flags import POLICY_FLAGS, flag_names, help_text, parse_args

DATA = ["--dataset.root=/d", "--policy.path=/p", "--output_dir=/o"]


def test_flags_come_after_the_preset_and_the_last_one_wins():
    config = parse_args(["--preset", "l4", *DATA, "--batch_size", "3", "--batch_size=5", "--dry_run"])
    assert config.batch_size == 5
    assert config.grad_accum == int(PRESETS["l4"]["grad_accum"])
    assert config.dry_run is True


def test_an_environment_is_named_as_for_lerobot_train_and_saved(tmp_path):
    first = parse_args([*DATA, f"--output_dir={tmp_path}", "--env.type=pusht", "--env.fps=5", "--eval.n_episodes", "7"])
    assert (first.env_type, first.env_options, first.eval.n_episodes) == ("pusht", ["--fps=5"], 7)
    assert [step for step in range(0, 50_001, 10_000) if first.is_evaluated(step, 50_000)] == [
        0,
        20_000,
        40_000,
        50_000,
    ]
    (tmp_path / "config.json").write_text(json.dumps(first.to_json()))
    again = parse_args([f"--output_dir={tmp_path}", "--resume", "--env_eval_freq=0"])
    assert (again.env_type, again.env_options, again.eval.n_episodes) == ("pusht", ["--fps=5"], 7)
    assert [step for step in range(0, 50_001, 10_000) if again.is_evaluated(step, 50_000)] == [50_000]
    assert not parse_args(DATA).is_evaluated(20_000, 20_000)
    # Who resumes by the command of the start gives the same options again.
    same = parse_args([f"--output_dir={tmp_path}", "--resume", "--env.type=pusht", "--env.fps=5", "--env.a=1"])
    assert same.env_options == ["--fps=5", "--a=1"]


def test_every_preset_is_valid():
    for name in PRESETS:
        assert parse_args(["--preset", name, *DATA]).preset == name
        assert parse_args(["--preset", name, *DATA, "--num_epochs=2"]).steps is None


def test_structured_values_and_the_policys_own_options():
    config = parse_args(
        [*DATA, "--dataset.episodes=[1,2]", '--rename_map={"a": "b"}', "--policy.chunk_size", "10", "--lr=1e-4"]
    )
    assert config.dataset.episodes == [1, 2]
    assert config.rename_map == {"a": "b"}
    mixed = parse_args([*DATA[1:], '--dataset.mixture={"s3://a/b": 2, "/c": 0.5}'])
    assert mixed.roots == ["s3://a/b", "/c"] and mixed.dataset.mixture["/c"] == 0.5
    assert config.policy_path == "/p" and config.policy_options == ["--chunk_size=10"]
    assert config.lr == 1e-4


def test_a_saved_config_comes_back_and_flags_change_it(tmp_path):
    first = parse_args([*DATA, f"--output_dir={tmp_path}", "--lr=1e-05", "--train.mode=heads"])
    (tmp_path / "config.json").write_text(json.dumps(first.to_json()))
    again = parse_args([f"--output_dir={tmp_path}", "--resume", "--grad_accum=2"])
    assert again.resume and again.grad_accum == 2 and again.lr == 1e-05
    assert again.train == first.train and again.policy_path == "/p"


def test_a_run_goes_on_for_so_many_epochs_whatever_said_how_long_it_was(tmp_path):
    for first, then in (("steps", "num_epochs"), ("num_epochs", "steps")):
        started = parse_args([*DATA, f"--output_dir={tmp_path}", f"--{first}=3"])
        (tmp_path / "config.json").write_text(json.dumps(started.to_json()))
        again = parse_args([f"--output_dir={tmp_path}", "--resume", f"--{then}=5"])
        assert getattr(again, then) == 5 and getattr(again, first) is None


def test_a_run_in_the_home_folder_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text(json.dumps(parse_args(DATA).to_json()))
    assert parse_args(["--output_dir=~/run", "--resume"]).resume


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--bs", "3"], "unknown flag --bs"),
        (["--root", "/d"], "did you mean --dataset.root"),
        (["--batchsize", "3"], "did you mean --batch_size"),
        (["--policy_path", "/p"], "did you mean --policy.path"),
        (["--dataset.camera_key", "[]"], "did you mean --dataset.camera_keys"),
        (["--eval_splits", "0"], "did you mean --dataset.eval_split"),
        ([*DATA, "--steps"], "--steps needs a value"),
        ([*DATA, "--dataset.root", "--dry_run"], "--dataset.root needs a value"),
        ([*DATA, "--seed=-1"], "--seed=-1: must be between 0 and 4294967295"),
        ([*DATA, "--seed=4294967296"], "--seed=4294967296: must be"),
        ([*DATA, "--dataset.episodes=0,x"], "dataset.episodes.*are written as JSON"),
        ([*DATA, "--rename_map=a:b"], "rename_map.*are written as JSON"),
        ([*DATA, "--dataset.revision=main"], "--dataset.revision=main is of a dataset on the Hub"),
        (["stray"], "'stray' belongs to no flag"),
        (["--preset", "x"], "--preset x: expected one of demo"),
        ([*DATA, "--batch_size", "many"], "batch_size"),
        ([*DATA, "--batch_size=0"], "--batch_size=0: must be positive"),
        ([*DATA, "--lr=nan"], "--lr=nan: must be positive"),
        ([*DATA, "--train.mode=all"], "--train.mode=all: expected one of heads, expert, full"),
        ([*DATA, "--train.noise_draws=0"], "--train.noise_draws=0: must be positive"),
        ([*DATA, "--train.attention=flash"], "--train.attention=flash: expected one of eager, sdpa"),
        ([*DATA, "--scaling.strategy=magic"], "--scaling.strategy=magic"),
        ([*DATA, "--warmup_frac=2"], "--warmup_frac=2"),
        ([*DATA, "--final_lr_frac=0", "--scheduler.num_warmup_steps=3"], "--final_lr_frac and --scheduler.num_warmup"),
        ([*DATA, "--lr=1e-4", "--optimizer.lr=1e-3"], "--lr and --optimizer.lr: give one"),
        ([*DATA, "--train.clip_norm=1", "--optimizer.grad_clip_norm=2"], "--train.clip_norm and --optimizer.grad_clip"),
        ([*DATA, "--use_policy_training_preset=false"], "with which optimizer. give --optimizer.type adamw"),
        (
            [*DATA, "--use_policy_training_preset=false", "--optimizer.type=adam"],
            "with which schedule. give --scheduler",
        ),
        ([*DATA, "--dataset.drop_n_last_frames=-1"], "--dataset.drop_n_last_frames=-1: a number of frames"),
        ([*DATA, "--dataset.eval_split=1"], "--dataset.eval_split=1"),
        ([*DATA, "--dataset.repo_id=a/b"], "--dataset.root, --dataset.repo_id and --dataset.mixture"),
        ([*DATA, '--dataset.mixture={"/a": 1}'], "--dataset.root, --dataset.repo_id and --dataset.mixture"),
        ([*DATA[1:], '--dataset.mixture={"/a": 1, "/b": 0}'], "the weight of /b is 0"),
        ([*DATA, "--dataset.exclude_episodes=bad.json"], r"expected episodes \(3,7,20:30\) or @FILE"),
        ([*DATA, "--dataset.image_size=[224]"], "expected auto, stored, or .height, width."),
        ([*DATA, "--dataset.image_size=224"], "expected auto, stored, or .height, width."),
        ([*DATA, "--dataset.max_skipped=2"], "max_skipped=2.0: a share of the rows"),
        ([*DATA, "--dataset.window_segments=0"], "window_segments=0: must be positive"),
        ([*DATA, "--dataset.read_timeout_s=0"], "--dataset.read_timeout_s=0.0: must be positive"),
        ([*DATA, "--dataset.frame_cache_gb=-1"], "--dataset.frame_cache_gb=-1.0: must be positive"),
        ([*DATA, "--policy.type=pi05"], "--policy.path and --policy.type"),
        ([*DATA, "--steps=3", "--num_epochs=1"], "--steps and --num_epochs"),
        (DATA[1:], "which data"),
        ([DATA[0], DATA[2]], "which policy"),
        (DATA[:2], "where to"),
        ([*DATA[:2], "--output_dir=s3://b/x"], "must be a path"),
        (["--resume"], "--resume: say which run"),
        ([*DATA, "--env.task=a"], "--env.task=a: in which environment"),
        ([*DATA, "--keep_best_by=success"], "--keep_best_by=success: in which environment"),
        ([*DATA, "--env.type=pusht", "--keep_best_by=success", "--export=best"], "leave one of them out"),
        ([*DATA, "--keep_best_by=luck"], "--keep_best_by=luck: expected one of loss, success"),
        ([*DATA, "--env.type=pusht", "--env_eval_freq=-1"], "--env_eval_freq=-1: a number of steps"),
        ([*DATA, "--env.type=pusht", "--env_eval_freq=300", "--save_freq=200"], "give a multiple of --save_freq"),
        ([*DATA, "--env.type=pusht", "--eval.n_episodes=0"], "--eval.n_episodes=0: must be positive"),
    ],
)
def test_what_is_wrong_is_said(flags, message):
    with pytest.raises(ValueError, match=message):
        parse_args(flags)


SECRET = "wJalr/XUtn+FEMI/canary"


@pytest.mark.parametrize(
    "root", [f"s3://AKIA:{SECRET}@b/arm", f"gs://{SECRET.replace('/', '')}@b", f"ftp://u:{SECRET}@h"]
)
@pytest.mark.parametrize(
    "flags",
    [
        ["--dataset.root={}"],
        ["--dataset.root", "{}"],
        ["--dataset.root=/data/a@1,{}"],
        ["--dataset.root", "simplecache::{}"],
        ['--dataset.mixture={{"/data": 1, "{}": "no number"}}'],
        ["--dataset.rot", "{}"],
        ["--dataset.root", "/data", "{}"],
        ["--{}"],
        ["--policy.path={}"],
        ["--output_dir={}"],
        ["--config_path={}"],
    ],
)
def test_an_address_with_credentials_is_refused_and_not_repeated(flags, root):
    """Before anything else is looked at, whatever else is wrong."""
    flags = [flag.format(root) for flag in flags]
    with pytest.raises(ValueError, match="an address with credentials in it .* is refused.*environment") as refused:
        parse_args([*DATA[1:], *flags, "--batch_size=many"])
    assert "canary" not in str(refused.value) and refused.value.__cause__ is None
    assert re.match("--(dataset.ro|dataset.mix|policy.path|output_dir|config_path)|command line:", str(refused.value))


def test_nor_is_one_of_a_file_of_options(tmp_path):
    path = tmp_path / "options.json"
    path.write_text(json.dumps({"dataset": {"root": f"s3://AKIA:{SECRET}@b/arm"}, "batch_size": "many"}))
    with pytest.raises(ValueError, match=f"^{path}: an address with credentials") as refused:
        parse_args([*DATA[1:], f"--config_path={path}"])
    assert "canary" not in str(refused.value)


@pytest.mark.parametrize(
    "root",
    [
        *(
            "/data/arm@2",
            "s3://bucket/arm@2",
            "s3://bucket/a:b@2",
            "http://127.0.0.1:9000/arm@2",
            "hf://datasets/a/b@main",
        ),
        *("s3://arn:aws:s3:eu-west-1:1:accesspoint/arms/a@2", "abfs://container@account.dfs.core.windows.net/arm"),
        *("s3://a,b@2", "s3://a:80,/b@2"),
    ],
)
def test_an_at_sign_elsewhere_is_no_credential(root):
    assert parse_args([*DATA[1:], "--dataset.root", root]).dataset.root == root


def test_a_job_that_is_retried_goes_on_where_there_is_a_run(tmp_path):
    flags = ["--resume", "auto", f"--output_dir={tmp_path}", "--dataset.root=/data", "--policy.type=pi05"]
    assert not parse_args(flags).resume
    started = parse_args([*flags, "--steps=7"])
    (tmp_path / CONFIG_NAME).write_text(json.dumps({**started.to_json(), "resume": True, "dry_run": True}))
    going_on = parse_args(flags)
    assert (going_on.resume, going_on.steps, going_on.dry_run) == (True, 7, False)
    # Its file serves another run as well, which is none that goes on.
    assert not parse_args([f"--config_path={tmp_path / CONFIG_NAME}", f"--output_dir={tmp_path / 'other'}"]).resume
    with pytest.raises(ValueError, match="--resume maybe: expected true, false, or auto"):
        parse_args([*flags, "--resume=maybe"])


def test_resuming_nothing(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no run; start one without --resume"):
        parse_args([f"--output_dir={tmp_path}", "--resume"])


def test_a_run_from_before_keeps_the_order_of_its_rows(tmp_path):
    saved = parse_args([*DATA, f"--output_dir={tmp_path}"]).to_json()
    assert saved["dataset"]["at_key_frames"] is True
    for name in ("image_size", "window_segments", "at_key_frames"):
        del saved["dataset"][name]
    (tmp_path / CONFIG_NAME).write_text(json.dumps(saved))
    dataset = parse_args(["--resume", f"--output_dir={tmp_path}"]).dataset
    assert (dataset.image_size, dataset.window_segments, dataset.at_key_frames) == ("stored", None, False)


def test_steps_from_epochs_and_the_smoke_cap(monkeypatch):
    monkeypatch.delenv("MAX_TRAIN_STEPS", raising=False)
    config = Config(batch_size=4, grad_accum=2, num_epochs=2)
    assert config.global_batch_size == 8
    assert config.resolve_steps(rows_per_epoch=100) == 25
    assert Config(steps=7).resolve_steps(100) == 7
    monkeypatch.setenv("MAX_TRAIN_STEPS", "3")
    assert config.resolve_steps(100) == 3 and Config(steps=2).resolve_steps(100) == 2
    monkeypatch.setenv("MAX_TRAIN_STEPS", "lots")
    with pytest.raises(ValueError, match="MAX_TRAIN_STEPS='lots'"):
        config.resolve_steps(100)


def test_modules_only_define():
    """Importing config starts neither Ray nor torch."""
    import subprocess
    import sys

    code = "import vla_finetuning.config, sys; sys.exit(any(m in sys.modules for m in ('ray', 'torch', 'lerobot')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_several_roots():
    assert parse_args([*DATA, "--dataset.root=/a, /b"]).roots == ["/a", "/b"]


def test_a_range_of_workers():
    config = parse_args([*DATA, "--scaling.num_workers", "2,4", "--batch_size=3", "--grad_accum=2"])
    assert (config.scaling.min_workers, config.scaling.num_workers) == (2, 4)
    assert config.global_batch_size == 24  # that of the most workers, however many there are
    for workers in (2, 3, 4):
        assert config.rows_multiple % (3 * workers) == 0
    assert parse_args([*DATA, "--scaling.num_workers=3"]).scaling.min_workers is None
    for given, message in {"4,2": "the least and the most, in that order", "2,64": "choose a narrower range"}.items():
        with pytest.raises(ValueError, match=message):
            parse_args([*DATA, f"--scaling.num_workers={given}"])


def test_every_flag_that_help_names_is_one():
    named = set(re.findall(r"^  --([\w.]+)", help_text(), flags=re.MULTILINE))
    policy = {name for name in named if name.startswith("policy.")}
    assert (
        policy == {f"policy.{name}" for name in ("path", "type", "pretrained_revision", "OPTION")} | POLICY_FLAGS.keys()
    )
    others = {f"{group}.OPTION" for group in ("env", "optimizer", "scheduler")}
    assert named - policy == flag_names().keys() - {"push_to_hub"} | {"env.type"} | others


@pytest.mark.parametrize("name", ["dataset.root", "policy.path", "output_dir", "dataset.cache_dir", "steps"])
@pytest.mark.parametrize("empty", ["", "  "])
def test_an_empty_value_is_refused(name, empty):
    """As an unset variable leaves it: `--preset demo --dataset.root=$DATA` trained on the demo."""
    for given in ([f"--{name}={empty}"], [f"--{name}", empty]):
        with pytest.raises(ValueError, match=f"--{name} is empty .*give a value, or leave it out"):
            parse_args(["--preset", "demo", *given])


@pytest.mark.parametrize(
    ("given", "episodes"),
    [("0,1,2", [0, 1, 2]), ("0:4", [0, 1, 2, 3]), ("7, 0:2", [7, 0, 1]), ("[3, 4]", [3, 4]), ("5", [5])],
)
def test_episodes_as_people_write_them(given, episodes):
    config = parse_args([*DATA, "--dataset.episodes", given, "--dataset.exclude_episodes", given]).dataset
    assert config.episodes == config.exclude_episodes == episodes


def test_episodes_of_several_datasets_and_of_a_file():
    config = parse_args([*DATA, '--dataset.episodes={"/d": [1]}', "--dataset.exclude_episodes", "@bad.json"]).dataset
    assert config.episodes == {"/d": [1]} and config.exclude_episodes == "@bad.json"


@pytest.mark.parametrize("given", ["0:", "a", "1,,2", "0:b"])
def test_episodes_that_are_none(given):
    with pytest.raises(ValueError, match=r"dataset\.episodes|list\[int\]"):
        parse_args([*DATA, "--dataset.episodes", given])


def test_numbers_and_cameras_as_people_write_them():
    config = parse_args(
        [*DATA, "--steps", "1e4", "--batch_size=2E1", "--lr", "1e-4", "--dataset.camera_keys=a.top,a.side"]
    )
    assert (config.steps, config.batch_size, config.lr) == (10_000, 20, 1e-4)
    assert config.dataset.camera_keys == ["a.top", "a.side"]
    with pytest.raises(ValueError, match="steps"):
        parse_args([*DATA, "--steps", "1.5e0"])


def test_help_loads_neither_ray_nor_torch():
    """So that it is there at once."""
    import subprocess
    import sys

    code = (
        "import runpy, sys; sys.argv = ['vla.py', '--help']\n"
        "try: runpy.run_path('vla.py', run_name='__main__')\n"
        "except SystemExit as ended: assert not ended.code\n"
        "assert not {'ray', 'torch', 'lerobot', 'numpy'} & set(sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == help_text() + "\n"
