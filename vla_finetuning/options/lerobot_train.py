"""List the flags of `lerobot-train` that vla.py refuses, and what does the same here.

    python -m vla_finetuning.options.lerobot_train > docs/lerobot_train.md

vla.py accepts a flag with the same meaning, or refuses it and names the replacement or the reason. It ignores no flag.
`tests/test_lerobot_train.py` compares the table with the options of LeRobot 0.6.1.
"""

from __future__ import annotations

from vla_finetuning.terminal import print_safe

_LOADER = "there is no DataLoader: read tasks use the CPUs that are free (--scaling.cpus_per_read_task)"
_TRACKER = "--track wandb; --resume continues its run, and wandb reads its own environment variables"
_NO_RECORDING = "play the finished policy with evaluate.py --eval.record_dataset DIR, which writes a LeRobot dataset"
_JOBS = "start it on the cluster: `ray job submit`, or the job files in configs/"

# Answers to the refused flags of `lerobot-train`. A name that ends in `.*` stands for all options of that group.
ANSWERED = {
    "dataset.repo_type": "datasets in buckets are read by their address: --dataset.root s3://..., gs://... or az://...",
    "dataset.image_transforms.tfs.*": "all of them in one flag, as JSON: --dataset.image_transforms.tfs",
    "dataset.video_backend": "PyAV decodes videos; frames equal those of LeRobot's pyav backend, bit for bit",
    "dataset.return_uint8": "frames always travel as uint8",
    "dataset.depth_output_unit": "depth maps are read in millimetres, LeRobot's default",
    "dataset.streaming": "datasets are always streamed, in the plan's order: leave it out",
    "eval.use_async_envs": "environments always run side by side, in processes of their own: --eval.env_actors",
    **dict.fromkeys(("eval.recording", "eval.recording_repo_id", "eval.recording_private"), _NO_RECORDING),
    "reward_model.*": "reward models are not trained here: use lerobot-train",
    "job_name": "a run's name is its folder: --output_dir",
    "cudnn_deterministic": "--train.deterministic",
    "num_workers": f"{_LOADER}; --scaling.num_workers are training processes, one GPU each",
    "prefetch_factor": _LOADER,
    "persistent_workers": _LOADER,
    "dataloader_multiprocessing_context": _LOADER,
    "save_checkpoint": "checkpoints are always saved, in the background: --save_freq says how often",
    "save_checkpoint_to_hub": "the policy is pushed once, at the end: --policy.repo_id; --export best: the best one",
    "wandb.enable": "--track wandb",
    "wandb.project": "--track_project",
    "wandb.*": _TRACKER,
    "job.*": _JOBS,
}


def answer(flag: str) -> str | None:
    """Return what does here what `lerobot-train`'s `--flag` does there; None for flags that are taken or unknown."""
    parts = flag.split(".")
    groups = [".".join([*parts[:n], "*"]) for n in range(len(parts) - 1, 0, -1)]
    return next((ANSWERED[name] for name in (flag, *groups) if name in ANSWERED), None)


def page() -> str:
    """Return the Markdown page of the refused flags."""
    head = (
        "<!-- Written by `python -m vla_finetuning.options.lerobot_train`. -->\n\n# The flags of lerobot-train\n\n"
        "LeRobot 0.6.1. vla.py takes every flag of lerobot-train that is not in this table, with the same name and\n"
        "meaning ([flags.md](flags.md)); those in it are refused, with this answer. Options of a policy that flags of\n"
        "the run decide, as --policy.device and --policy.compile_model, are refused with the name of that flag. Where\n"
        "LeRobot takes 0 for never or automatic (--save_freq, --log_freq, --eval.batch_size), a number of at least 1\n"
        "is expected; with --env_eval_freq 0, the last checkpoint still plays.\n\n"
        "| flag | here |\n|---|---|"
    )
    return "\n".join([head, *(f"| `--{flag}` | {reply} |" for flag, reply in ANSWERED.items())])


if __name__ == "__main__":
    print_safe(*page().split("\n"))
