"""Block Python code that comes with downloaded weights, unless the user trusts it.

transformers runs Python files of a folder or Hub repository if a configuration names them (`auto_map`) and the caller
passes `trust_remote_code=True`. LeRobot 0.6.1 passes it for repositories that a policy's files name, so a folder of
JSON files could run a program. `remote_code` patches the functions of transformers and diffusers that every such load
calls: transformers' decision whether code is allowed, and its execution in both. The patch stays for the life of the
process, because some policies load more at their first batch.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from lerobot.configs import PreTrainedConfig

logger = logging.getLogger(__name__)

HOW_TO_TRUST = (
    "read that code; if you trust it with this machine and your tokens, --policy.trust_remote_code true lets it run"
)
# Names in transformers 5.5 and diffusers 0.39.
DECIDE, EXECUTE = "resolve_trust_remote_code", "get_class_in_module"
# Policies of LeRobot 0.6.1 that pass `trust_remote_code=True`, and the option that names the repository. groot passes
# it too, but for a model that transformers implements.
CODE_OPTIONS = {
    "pi0_fast": "action_tokenizer_name",
    "wall_x": "action_tokenizer_path",
    "gaussian_actor": "vision_encoder_name",
}

_trusted: ContextVar[bool] = ContextVar("trusted", default=False)


class RemoteCodeError(ValueError):
    """A policy needs to run its own code, and the user has not allowed it."""


def code_source(config: PreTrainedConfig) -> str | None:
    """Return the folder or Hub id whose code the policy needs to run; None if it needs none."""
    return getattr(config, CODE_OPTIONS.get(config.type, ""), None)


@contextlib.contextmanager
def remote_code(trusted: bool) -> Iterator[None]:
    """Allow a policy's own code inside the block if `trusted`; outside of such blocks it never runs.

    Wrap every load that a policy's files control. Executed files are logged.

    Raises:
        RemoteCodeError: raised inside the block if untrusted code would run.
    """
    _patch()
    before = _trusted.set(trusted)
    try:
        yield
    finally:
        _trusted.reset(before)


def _patch() -> None:
    """Patch the deciding and executing functions in every module that has imported them."""
    import diffusers.utils.dynamic_modules_utils as diffusers_code
    import transformers.dynamic_module_utils as transformers_code
    import transformers.generation.utils  # noqa: F401  (imports them for `custom_generate`)

    guards: list[tuple[Any, str, Callable[..., Any]]] = [
        (transformers_code, DECIDE, _guard_decision),
        (transformers_code, EXECUTE, _guard_execution),
        (diffusers_code, EXECUTE, _guard_execution),
    ]
    for owner, name, guard in guards:
        original = getattr(owner, name)
        if original.__module__ == __name__:
            continue  # patched already
        replacement = guard(original, owner)
        for module in list(sys.modules.values()):
            if getattr(module, "__dict__", {}).get(name) is original:
                setattr(module, name, replacement)


def _guard_decision(original: Callable[..., bool], owner: Any) -> Callable[..., bool]:
    def resolve_trust_remote_code(
        trust_remote_code: bool | None,
        model_name: str,
        has_local_code: bool,
        has_remote_code: bool,
        error_message: str | None = None,
        upstream_repo: str | None = None,
    ) -> bool:
        if _trusted.get():
            trust = True if trust_remote_code is None else trust_remote_code
            return original(trust, model_name, has_local_code, has_remote_code, error_message, upstream_repo)
        if has_remote_code and not has_local_code:
            source = upstream_repo or "it"
            raise RemoteCodeError(
                f"{model_name} can only be loaded by code that comes with {source}, which is not run: {HOW_TO_TRUST}"
            )
        return False  # use transformers' own class

    return resolve_trust_remote_code


def _guard_execution(original: Callable[..., type], owner: Any) -> Callable[..., type]:
    def get_class_in_module(class_name: str, module_path: Any, **options: Any) -> type:
        path = Path(owner.HF_MODULES_CACHE, module_path)
        if not _trusted.get():
            raise RemoteCodeError(f"{class_name} is code that comes with a policy, in {path}: {HOW_TO_TRUST}")
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        logger.warning("running %s of %s (sha256 %s), as --policy.trust_remote_code allows", class_name, path, digest)
        return original(class_name, module_path, **options)

    return get_class_in_module
