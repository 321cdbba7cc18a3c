"""Options: what flags, presets, files and saved runs set, and the errors for invalid ones."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from vla_finetuning.environment import Timeouts, cache_gb
from vla_finetuning.options.command_line import (
    PROGRAMS,
    page,
    parse_args,
    parse_evaluate,
    parse_grpo,
    parse_record,
    parse_value,
)
from vla_finetuning.options.fields import decided, get_option
from vla_finetuning.options.job import CONFIG_NAME
from vla_finetuning.options.programs import PRESETS, Config
from vla_finetuning.run.folder import changed_options

DATA = ["--dataset.root=/d", "--policy.path=/p", "--output_dir=/o"]
LOSSES = [*DATA, "--dataset.eval_split=0.1", "--eval_steps=300", "--save_freq=1000", "--env.type=two_bins"]
GRPO = ["--policy.path=/p", "--env.type=two_bins", "--output_dir=/o"]


def save(config, folder):
    (folder / CONFIG_NAME).write_text(json.dumps(config.to_json()))


@pytest.fixture
def started(tmp_path):
    """Save the options of a run in its folder; return them, and the flags that resume it."""

    def start(*flags, parse=parse_args):
        config = parse([*(DATA if parse is parse_args else GRPO), *flags, f"--output_dir={tmp_path}"])
        save(config, tmp_path)
        return config, [f"--output_dir={tmp_path}", "--resume"]

    return start


def test_last_flag_wins_over_earlier_ones_and_the_preset():
    config = parse_args(["--preset", "l4", *DATA, "--batch_size", "3", "--batch_size=5", "--dry_run"])
    assert config.batch_size == 5
    assert config.grad_accum == int(PRESETS["l4"]["grad_accum"])
    assert config.dry_run is True


def test_environment_options_are_lerobot_trains_and_survive_resume(started):
    first, resume = started("--env.type=pusht", "--env.fps=5", "--eval.n_episodes", "7")
    resumed = parse_args([*resume, "--env_eval_freq=0"])
    for config, evaluated in ((first, [0, 20_000, 40_000, 50_000]), (resumed, [50_000])):
        assert (config.env_type, config.env_options, config.eval.n_episodes) == ("pusht", ["--fps=5"], 7)
        assert [step for step in range(0, 50_001, 10_000) if config.is_evaluated(step, 50_000)] == evaluated
    assert not parse_args(DATA).is_evaluated(20_000, 20_000)
    # Options that are given again at a resume are not doubled.
    resumed = parse_args([*resume, "--env.type=pusht", "--env.fps=5", "--env.a=1"])
    assert resumed.env_options == ["--fps=5", "--a=1"]


def test_ema_option_enables_ema():
    assert parse_args([*DATA, "--ema.decay=0.999"]).ema.enable
    assert not parse_args([*DATA, "--ema.decay=0.999", "--ema.enable=false"]).ema.enable
    assert not parse_args(DATA).ema.enable


def test_resume_with_another_preset_is_refused(started):
    _, resume = started("--preset=h100")
    assert parse_args([*resume, "--preset=h100"]) == parse_args(resume)
    own_config = f"--config_path={resume[0].partition('=')[2]}/{CONFIG_NAME}"
    assert parse_args([*resume, own_config]) == parse_args([resume[0], "--resume=auto", "--config_path=/other"])
    with pytest.raises(ValueError, match="--config_path with --resume: the run goes on with its own options"):
        parse_args([*resume, "--config_path=/other"])
    with pytest.raises(ValueError, match="--preset l4 with --resume: the run was started with --preset h100, and its"):
        parse_args([*resume, "--preset=l4"])


def test_presets_are_valid_and_demos_use_no_gpu():
    """The two workers of a demo would need two GPUs."""
    demos = [program.presets["demo"] for program in PROGRAMS if program.presets]
    assert [demo["scaling.use_gpu"] for demo in demos] == ["false"] * 3
    for name in PRESETS:
        assert parse_args(["--preset", name, *DATA]).preset == name
        assert parse_args(["--preset", name, *DATA, "--num_epochs=2"]).steps is None


def test_resume_replaces_steps_by_epochs_and_epochs_by_steps(started):
    for first, then in (("steps", "num_epochs"), ("num_epochs", "steps")):
        _, resume = started(f"--{first}=3")
        resumed = parse_args([*resume, f"--{then}=5"])
        assert getattr(resumed, then) == 5 and getattr(resumed, first) is None


def test_tilde_in_output_dir_is_expanded_on_resume(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "run").mkdir()
    save(parse_args(DATA), tmp_path / "run")
    assert parse_args(["--output_dir=~/run", "--resume"]).resume


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--root", "/d"], "did you mean --dataset.root"),
        ([*DATA, "--steps"], "--steps needs a value"),
        ([*DATA, "--resume=maybe"], "--resume=maybe: expected true, false or auto"),
        ([*DATA, "--scaling.num_workers=4,2"], "the least and the most, in that order"),
        ([*DATA, "--scaling.num_workers=2,64"], "choose a narrower range"),
        ([*DATA, "--seed=-1"], "--seed=-1: expected a whole number, at least 0 and at most 4294967295"),
        ([*DATA, "--dataset.episodes=0:99999999999"], "expected episode numbers"),
        ([*DATA, "--dataset.episodes", "0-1"], r"0-1: expected episode numbers, as 3,7,20:30 \(20 to 29\), or JSON"),
        ([*DATA, "--rename_map=a=b"], r"""--rename_map=a=b: expected JSON, as '{"observation.images.front": "obs"""),
        ([*DATA, "--dataset.revision=None"], "^--dataset.revision=None: expected a text; did you mean null[?]$"),
        ([*DATA, "--dataset.tasks", "Null"], "^--dataset.tasks=Null: expected patterns, .*; did you mean null[?]$"),
        ([*DATA, "--steps=1.5"], "^--steps=1.5: expected a whole number, at least 1$"),
        ([*DATA, "--train.precision=bf61"], "expected one of auto, fp32, bf16; did you mean bf16[?]$"),
        ([*DATA, "--policy.config-path=x"], "unknown flag --policy.config-path"),
        ([*DATA, "--keep_best=2,luck"], "^--keep_best=2,luck: expected a whole number, or .* 2,loss or 2,success"),
        ([*DATA, "--scaling.min_workers=2"], "did you mean --scaling.num_workers"),
        (["stray"], "'stray' belongs to no flag"),
        (["--preset", "x"], "--preset x: expected one of demo"),
        ([*DATA, "--lr=nan"], "--lr=nan: expected a number, above 0"),
        ([*DATA, "--final_lr_frac=0", "--scheduler.num_warmup_steps=3"], "--final_lr_frac and --scheduler.num_warmup"),
        ([*DATA, "--use_policy_training_preset=false"], "with which optimizer. give --optimizer.type adamw"),
        (
            [*DATA, "--use_policy_training_preset=false", "--optimizer.type=adam"],
            "with which schedule. give --scheduler",
        ),
        ([*DATA, '--dataset.mixture={"/a": 1}'], "--dataset.root=/d with --dataset.mixture={.*}: give one of them"),
        ([*DATA[1:], '--dataset.mixture={"/a": 1, "/b": 0}'], "the weight of /b is 0"),
        ([*DATA, "--dataset.exclude_episodes=bad.json"], r"expected episodes \(3,7,20:30\) or @FILE"),
        ([*DATA, "--dataset.image_size=[224]"], "expected auto, stored, or .height, width."),
        (DATA[1:], "which data"),
        (["--dataset.root=,", "--preset=demo"], "which data"),
        *(
            ([*DATA, f"--{name}=s3://b/x"], f"--{name}=s3://b/x: expected a folder on each node's own disk")
            for name in ("dataset.cache_dir", "dataset.frame_cache")
        ),
        ([DATA[0], DATA[2]], "which policy"),
        (DATA[:2], "where to"),
        ([*DATA[:2], "--output_dir=http://b/x"], "expected a path, s3://BUCKET/FOLDER, gs:"),
        (["--resume"], "--resume: say which run"),
        ([*DATA, "--dataset.max_skipped=0.1"], "max_skipped=0.1 does nothing without --dataset.on_error=skip"),
        ([*DATA, "--dataset.image_transforms.random_order"], "does nothing without --dataset.image_transforms.enable"),
        ([*DATA, "--config_path=/none.json"], "^/none.json: cannot be read as JSON .*; give a run's config.json"),
        ([*DATA, "--policy.private=true"], "private=true does nothing without --policy.repo_id"),
        ([*DATA, "--keep_best=1,success"], "--keep_best=N,success: in which environment"),
        ([*DATA, "--env.type=pusht", "--keep_best=1,success", "--export=best"], "leave one of them out"),
        ([*LOSSES, "--keep_best=1,loss"], "--save_freq that is a multiple of --eval_steps"),
        ([*DATA, "--env.type=pusht", "--env_eval_freq=300", "--save_freq=200"], "give a multiple of --save_freq"),
    ],
)
def test_invalid_options_are_refused_with_a_remedy(flags, message):
    with pytest.raises(ValueError, match=message):
        parse_args(flags)


MIXTURE = ["--policy.path=/p", "--output_dir=/o", "--dataset.mixture"]
RECORD = ["--env.type=metaworld", "--env.task=reach-v3", "--root=/d"]
ONE_ROBOT_UNNAMED = '{"/a": {"robot": "x"}, "/b": 1}'
TWO_ROBOTS = '{"/a": {"robot": "x"}, "/b": {"robot": "y"}}'


@pytest.mark.parametrize(
    ("parse", "flags", "message"),
    [
        (parse_args, [*DATA, "--train.exact_mean", "--sample_weighting.kappa=1"], "with --sample_weighting.type=rabc"),
        (parse_args, [*DATA, "--policy.push_to_hub"], "=true: to which repository[?] give --policy.repo_id"),
        (
            parse_args,
            [*DATA, "--scaling.strategy=hsdp", "--scaling.num_workers=2,4"],
            "^--scaling.num_workers with .*give --scaling.num_workers one number",
        ),
        (parse_args, [*DATA, "--scaling.shard_workers=2"], "=2 with --scaling.strategy=ddp: .*leave it out"),
        (parse_args, [*DATA, "--eval_steps=2"], "--eval_steps=2: no episode is held out .*; give --dataset.eval_split"),
        (parse_args, [*MIXTURE, ONE_ROBOT_UNNAMED], "/b names no robot, others are of x"),
        (parse_args, [*MIXTURE, '{"/a": {"episodes": [1]}}', "--dataset.episodes=2"], "episodes, and episodes of /a"),
        (parse_grpo, [*GRPO, "--scaling.num_workers=2,4"], "groups are shared out evenly among a fixed number"),
        (parse_grpo, [*GRPO, "--grpo.record_dataset=s3://b/x"], "--grpo.record_dataset=s3://b/x: .* written to a disk"),
        (parse_grpo, GRPO[1:], "which policy[?] .* trained by imitation"),
        (parse_grpo, [GRPO[0], GRPO[2], "--env.task=a"], "in which environment"),
        (parse_grpo, [*GRPO, "--grpo.gamma=0.9"], "=0.9 does nothing without --grpo.method=ppo: give both, or neither"),
        (
            parse_value,
            [*DATA, "--value.backbone_lr=1e-4"],
            "backbone_lr=0.0001 does nothing without --value.backbone=t",
        ),
        (parse_grpo, [*GRPO, "--dataset.root=/d"], "unknown flag --dataset.root"),
        (parse_grpo, [*GRPO, "--policy.type=pi05"], "--policy.type starts from random weights"),
        (parse_grpo, [*GRPO, "--train.noise_draws=2"], "unknown flag --train.noise_draws"),
        (parse_grpo, [*GRPO, "--keep_best=1,success"], "--keep_best=1,success: expected a whole number, at least 0"),
        (parse_evaluate, [*GRPO, "--steps=1"], "unknown flag --steps"),
        (parse_evaluate, [*GRPO, "--eval.use_async_envs=true"], "LeRobot has .*; here: environments always run side"),
        (parse_evaluate, GRPO[:2], "where to[?] give --output_dir FOLDER or .*; given again, it goes on there"),
        (parse_record, RECORD[:1], "give --env.type and --root, as"),
        (parse_record, [*RECORD, "--seed=4294967295"], "must be at most 4294967245"),
        (parse_evaluate, ["--wandb.enable=true"], "unknown flag --wandb.enable"),
        (parse_value, [DATA[0], DATA[2]], "the value function uses a policy's vision and language model"),
        (parse_value, [*DATA, "--train.mode=full"], "--train.mode=full: --value.backbone says what trains"),
        (parse_value, [*DATA, "--scaling.strategy=fsdp2"], "value functions are not sharded"),
        (parse_value, [*DATA, "--dataset.on_error=skip"], "a frame that cannot be read has no value"),
        (parse_value, [*MIXTURE, TWO_ROBOTS], "a value function learns from datasets of one robot"),
    ],
)
def test_contradicting_options_are_refused_with_a_remedy(parse, flags, message):
    with pytest.raises(ValueError, match=message):
        parse(flags)


def test_option_without_effect_is_accepted_on_resume(started):
    _, resume = started("--dataset.on_error=skip", "--dataset.max_skipped=0.5")
    resumed = parse_args([*resume, "--dataset.on_error=stop"])
    assert (resumed.dataset.on_error, resumed.dataset.max_skipped) == ("stop", 0.5)
    saved = parse_args([*DATA, resume[0], "--policy.repo_id=a/b", "--policy.private=true"])
    save(replace(saved, policy_repo_id=None), Path(saved.output_dir))
    assert parse_args(resume).policy_private  # of an earlier version
    save(parse_value([*DATA, resume[0], "--value.backbone=true", "--value.backbone_lr=1e-4"]), Path(saved.output_dir))
    assert parse_value([*resume, "--value.backbone=true"]).value.backbone_lr == 1e-4


def test_option_conditions_name_known_options_and_valid_values():
    """A condition on a name that no program has would never hold, or always."""
    known = {flag.name: flag for program in PROGRAMS for flag in program.flags.values()}
    conditions = []
    for flag in known.values():
        conditions += [*flag.requires, *flag.conflicts, *([flag.only_with] if flag.only_with else [])]
    assert len(conditions) > 20
    for name, equals, text in (condition.partition("=") for condition in conditions):
        assert name in known and (not equals or known[name].read(text) != known[name].default), name


SECRET = "wJalr/XUtn+FEMI/canary"
ROOTS = [f"s3://AKIA:{SECRET}@b/arm", f"gs://{SECRET.replace('/', '')}@b", f"ftp://u:{SECRET}@h"]


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
def test_address_with_credentials_is_refused_without_echoing_it(flags):
    """Before other invalid options are reported."""
    for root in ROOTS:
        with pytest.raises(ValueError, match="an address with credentials in it .* is refused.*environment") as refused:
            parse_args([*DATA[1:], *(flag.format(root) for flag in flags), "--batch_size=many"])
        assert "canary" not in str(refused.value) and refused.value.__cause__ is None
        where = "--(dataset.ro|dataset.mix|policy.path|output_dir|config_path)|command line:"
        assert re.match(where, str(refused.value))


def test_at_sign_outside_credentials_is_accepted():
    for root in (
        "/data/arm@2",
        "s3://bucket/arm@2",
        "s3://bucket/a:b@2",
        "http://127.0.0.1:9000/arm@2",
        "hf://datasets/a/b@m",
        "s3://arn:aws:s3:eu-west-1:1:accesspoint/arms/a@2",
        "abfs://container@account.dfs.core.windows.net/arm",
        "s3://a,b@2",
        "s3://a:80,/b@2",
    ):
        assert parse_args([*DATA[1:], "--dataset.root", root]).dataset.root == root


def test_resume_auto_resumes_if_the_folder_has_a_run(tmp_path, bucket_url):
    flags = ["--resume", "auto", f"--output_dir={tmp_path}", "--dataset.root=/data", "--policy.type=pi05"]
    assert not parse_args(flags).resume
    save(replace(parse_args([*flags, "--steps=7"]), resume=True, dry_run=True), tmp_path)
    resumed = parse_args(flags)
    assert (resumed.resume, resumed.steps, resumed.dry_run) == (True, 7, False)
    # The saved file as the options of a new run.
    assert not parse_args([f"--config_path={tmp_path / CONFIG_NAME}", f"--output_dir={tmp_path / 'other'}"]).resume
    for other in (f"{tmp_path / 'other'}", bucket_url):
        with pytest.raises(FileNotFoundError, match=f"{other} holds no run; leave --resume out to start one"):
            parse_args([f"--output_dir={other}", "--resume"])
        with pytest.raises(ValueError, match=f"^{other}/{CONFIG_NAME}: cannot be read as JSON"):
            parse_args([f"--config_path={other}/{CONFIG_NAME}", "--dataset.root=/data"])


def test_flag_replaces_related_options_of_preset_or_saved_run(tmp_path):
    demo = ["--preset=demo", *DATA[:2], "--optimizer.lr=1e-4", "--scheduler.num_warmup_steps=10"]
    config = parse_args(demo)
    assert (config.lr, config.warmup_frac, config.optimizer_options) == (None, None, ["--lr=1e-4"])
    hub = ["--dataset.repo_id=a/b", "--dataset.revision=c1", "--policy.path=a/p", "--policy.pretrained_revision=c2"]
    save(parse_args([*hub, "--num_epochs=3", f"--output_dir={tmp_path}"]), tmp_path)
    from_file = [f"--config_path={tmp_path / CONFIG_NAME}", "--output_dir=/o"]
    new = parse_args([*from_file, "--policy.path=/p", "--dataset.root=/d", "--preset=h100"])
    assert (new.policy_path, new.policy_revision, new.num_epochs, new.steps) == ("/p", None, None, 30_000)
    assert (new.dataset.root, new.dataset.repo_id, new.dataset.revision) == ("/d", None, None)
    assert parse_args([*from_file, "--dataset.repo_id=a/c"]).dataset.revision is None
    assert parse_args([*from_file, "--policy.type=act"]).policy_path is None
    save(parse_args([*DATA, "--preset=demo", "--log_freq=7", "--dataset.episodes=3,7"]), tmp_path)
    new = parse_args([*from_file, "--preset=l4", "--dataset.root=/e"])
    assert (new.lr, new.warmup_frac, new.log_freq, new.dataset.episodes) == (None, None, 7, None)
    save(parse_args([*hub, f"--output_dir={tmp_path}"]), tmp_path)
    resumed = parse_args(["--resume", f"--output_dir={tmp_path}", *hub[:1], *hub[2:3], "--steps=9"])
    assert (resumed.policy_revision, resumed.dataset.revision, resumed.num_epochs) == ("c2", "c1", None)


def test_steps_follow_epochs_and_max_train_steps(monkeypatch):
    monkeypatch.delenv("MAX_TRAIN_STEPS", raising=False)
    config = Config(batch_size=4, grad_accum=2, num_epochs=2)
    assert config.global_batch_size == 8
    assert config.resolve_steps(rows_per_epoch=100) == 25
    assert Config(steps=7).resolve_steps(100) == 7
    monkeypatch.setenv("MAX_TRAIN_STEPS", "3")
    assert config.resolve_steps(100) == 3 and Config(steps=2).resolve_steps(100) == 2
    monkeypatch.setenv("MAX_TRAIN_STEPS", "")
    assert config.resolve_steps(100) == 25
    monkeypatch.setenv("MAX_TRAIN_STEPS", "lots")
    with pytest.raises(ValueError, match="MAX_TRAIN_STEPS='lots'"):
        config.resolve_steps(100)


def test_worker_range_sets_global_batch_and_row_multiple():
    config = parse_args([*DATA, "--scaling.num_workers", "2,4", "--batch_size=3", "--grad_accum=2"])
    assert (config.scaling.min_workers, config.scaling.num_workers) == (2, 4)
    assert config.global_batch_size == 24  # that of the most workers, however many there are
    for workers in (2, 3, 4):
        assert config.rows_multiple % (3 * workers) == 0
    assert parse_args([*DATA, "--scaling.num_workers=3"]).scaling.min_workers is None


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.command)
def test_help_lists_every_flag_with_sentence_values_and_default(program):
    shown = program.help()
    blocks = dict(re.findall(r"^  --([\w.]+) VALUE\n((?:      .*\n?)+)", shown, flags=re.MULTILINE))
    assert blocks.keys() == {name.replace("*", "OPTION") for name in program.flags}
    for name, flag in program.flags.items():
        text = " ".join(blocks[name.replace("*", "OPTION")].split())
        assert text.startswith(flag.help) and len(flag.help) > 15, name
        if not name.endswith("*"):
            assert flag.expected in text and re.search(r"[.;] default \S+\)$|; default [^;]+\)$", text), text
    assert list(blocks)[: len(program.first)] == list(program.first)
    assert all(f"--preset {name}: " in shown for name in program.presets)
    assert max(map(len, shown.split("\n"))) <= 120


def test_flags_page_matches_the_options():
    assert (Path(__file__).parents[1] / "docs" / "flags.md").read_text() == page() + "\n"


@pytest.mark.parametrize("name", ["dataset.root", "steps"])
@pytest.mark.parametrize("empty", ["", "  "])
def test_empty_value_is_refused(name, empty):
    """As an unset variable leaves it: `--preset demo --dataset.root=$DATA` trained on the demo."""
    for flags in ([f"--{name}={empty}"], [f"--{name}", empty]):
        with pytest.raises(ValueError, match=f"--{name} is empty .*give a value, or leave it out"):
            parse_args(["--preset", "demo", *flags])


@pytest.mark.parametrize(
    ("flag", "path", "value"),
    [
        ("--track_project=1e3", "track_project", "1e3"),
        ("--policy.chunk_size=10", "policy_options", ["--chunk_size=10"]),
        ("--policy.a=include x", "policy_options", ["--a=include x"]),
        ("--lr=.5", "lr", 0.5),
        ("--steps=1e4", "steps", 10_000),
        ("--dry_run=False", "dry_run", False),
        ('--rename_map={"a": "b"}', "rename_map", {"a": "b"}),
        ("--dataset.root=/a, /b", "dataset.roots", ["/a", "/b"]),
        ("--dataset.episodes=7, 0:2", "dataset.episodes", [7, 0, 1]),
        ("--dataset.episodes=5", "dataset.episodes", [5]),
        ('--dataset.episodes={"/d": [1]}', "dataset.episodes", {"/d": [1]}),
        ("--dataset.exclude_episodes=@bad.json", "dataset.exclude_episodes", "@bad.json"),
        ("--dataset.camera_keys=a.top,a.side", "dataset.camera_keys", ["a.top", "a.side"]),
        ("--dataset.image_size=224,320", "dataset.image_size", [224, 320]),
        ("--peft.target_modules=.*(q|v)_{1,2}", "peft.target_modules", ".*(q|v)_{1,2}"),
        ("--keep_best=3", "keep_best_by", "loss"),
        ("--dataset.skip_idle=null", "dataset.skip_idle", None),
    ],
)
def test_flag_values_are_parsed_by_type(flag, path, value):
    assert get_option(parse_args([*DATA, *flag.split("=", 1)]), path) == value


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ([], "expected a JSON object; give a run's config.json"),
        (
            {"dataset": {"repo_type": "dataset"}, "policy": {"type": "act"}, "wandb": {}},
            "of lerobot-train, .* --output_dir FOLDER --resume goes on",
        ),
        ({"batch_sise": 3}, "batch_sise is no option; did you mean batch_size"),
        ({"dataset": {"rot": "/d"}}, "dataset.rot is no option; did you mean dataset.root"),
        ({"train": {"feature_cache": "/f"}}, "train.feature_cache is no option; delete its line"),
        (
            {"grpo": {"method": "ppo"}, "dataset": {}},
            "grpo.method is no option; .*or give the file of a run of this program",
        ),
        ({"batch_size": "3"}, '--batch_size="3": expected a whole number'),
        ({"policy_repo_id": "none"}, '--policy.repo_id="none": expected a text; did you mean null[?]'),
        ({"batch_size": True}, "--batch_size=true: expected a whole number"),
        ({"train": {"mode": "all"}}, "expected one of heads, expert, full"),
        ({"keep_best_by": 3}, "--keep_best_by=3: expected one of loss, success"),
        ({"dataset": {"root": f"s3://AKIA:{SECRET}@b/arm"}, "batch_size": "many"}, "an address with credentials"),
    ],
)
def test_invalid_options_file_is_refused_by_path(tmp_path, changed, message):
    path = tmp_path / "options.json"
    path.write_text(json.dumps(changed))
    with pytest.raises(ValueError, match=f"^{path}:? .*{message}") as refused:
        parse_args([*DATA, f"--config_path={path}"])
    assert "canary" not in str(refused.value)


def test_saved_options_round_trip_through_resume(started, tmp_path):
    """Also options that no flag sets by itself; flags of the resume replace them."""
    options = {
        "scaling.num_workers": "2,8", "keep_best": "2,success", "env.type": "two_bins", "env.a": "b",
        "dataset.eval_split": "0.1", "eval_steps": "300", "save_freq": "1000",
        "optimizer.betas": "[0.9, 0.99]", "dataset.image_transforms.enable": "true", "dataset.image_size": "[8, 8]",
        "rename_map": '{"a": "b"}', "num_epochs": "1.5", "dataset.shuffle_window": "64", "peft.r": "4",
        "policy.repo_id": "a/b", "lr": "1e-05",
    }  # fmt: skip
    first, resume = started(*(f"--{name}={value}" for name, value in options.items()))
    assert (first.keep_best, first.keep_best_by) == (2, "success")
    assert parse_args(resume) == replace(first, resume=True)
    assert parse_args([*resume, "--grad_accum=2"]) == replace(first, resume=True, grad_accum=2)
    saved = first.to_json()
    saved["given"] = {"train.feature_cache": 3}
    saved["train"]["feature_cache"] = None  # an option of earlier versions
    (tmp_path / CONFIG_NAME).write_text(json.dumps(saved))
    assert parse_args(resume) == replace(first, resume=True)


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "much"])
def test_environment_limits_must_be_positive_numbers(monkeypatch, text):
    assert cache_gb(7.0) == 7.0
    monkeypatch.setenv("VLA_CACHE_GB", "2.5")
    assert cache_gb(7.0) == 2.5
    monkeypatch.setenv("VLA_CACHE_GB", text)
    with pytest.raises(ValueError, match=f"VLA_CACHE_GB='{text}' in the environment: expected a number above 0"):
        cache_gb(7.0)
    assert Timeouts.from_environment() == Timeouts()
    monkeypatch.setenv("VLA_STORE_TIMEOUT_S", "40")
    assert Timeouts.from_environment() == Timeouts(store=40.0)
    monkeypatch.setenv("VLA_READ_TIMEOUT_S", text)
    with pytest.raises(ValueError, match=f"VLA_READ_TIMEOUT_S='{text}' in the environment"):
        Timeouts.from_environment()


def test_resume_preserves_decisions_of_the_plan(started, tmp_path):
    """Also if the first command is repeated; a new run decides anew."""
    flags = ["--dataset.repo_id=a/b", "--dataset.revision=main", "--dataset.statistics=auto"]
    first, resume = started("--dataset.root=null", *flags)
    decisions = {"dataset.revision": "c0ffee", "dataset.statistics": "exact", "dataset.shard_rows": 8}
    planned = decided(decided(first, decisions), {**decisions, "scaling.use_gpu": True})
    save(planned, tmp_path)
    for repeated in ([], flags):
        resumed = parse_args([*resume, *repeated])
        assert resumed == replace(planned, resume=True) and not changed_options(resumed)
    resumed = parse_args([*resume, "--dataset.revision=v2", "--scaling.use_gpu=null"])
    assert (resumed.dataset.revision, resumed.scaling.use_gpu) == ("v2", None)
    assert resumed.given == {path: planned.given[path] for path in ("dataset.shard_rows", "dataset.statistics")}
    assert changed_options(resumed) == ["dataset.revision was c0ffee, is v2", "scaling.use_gpu was True, is None"]
    new = [f"--config_path={tmp_path / CONFIG_NAME}", f"--output_dir={tmp_path}"]
    assert parse_args(new) == first and parse_args([*new, *flags[:1]]).dataset.revision is None


def test_grpo_resume_refuses_options_of_training(started, tmp_path):
    first, resume = started("--grpo.groups=4", "--seed=3", parse=parse_grpo)
    assert parse_grpo(resume) == replace(first, resume=True)
    (tmp_path / CONFIG_NAME).write_text(json.dumps(first.to_json() | {"log_freq": 3}))
    with pytest.raises(ValueError, match="log_freq is no option"):
        parse_grpo(resume)


def test_grpo_options_convert_to_training_options():
    flags = ["--train.attention=eager", "--scaling.num_workers=4", "--lr=3e-6", "--keep_best=2"]
    config = parse_grpo([*GRPO, *flags]).training()
    assert (config.train.attention, config.train.noise_draws, config.scaling.num_workers) == ("eager", 1, 4)
    assert (config.policy_path, config.lr, config.best_kept, config.save_freq) == ("/p", 3e-6, 2, 10)
    assert not config.is_evaluated(10, 10), "checkpoints play no episodes beside the training"
