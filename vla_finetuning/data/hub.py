"""Resolve revisions, download files and explain errors of the Hugging Face Hub.

Runs on the driver. `huggingface_hub` finds the token itself (`HF_TOKEN` or its token file); errors never contain it.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator
from typing import Any

logger = logging.getLogger(__name__)


def resolve_commit(repo_id: str, revision: str | None, *, repo_type: str, default_revision: str | None = None) -> str:
    """Return the commit (40 hexadecimal digits) that a branch or tag names now, so that a run can be repeated exactly.

    A full commit hash is returned as it is: a cached commit needs no network. None is `default_revision` where the
    repository has it, or else its default branch. Raises ValueError and OSError as `explaining_errors`.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RevisionNotFoundError

    if revision is not None and re.fullmatch(r"[0-9a-f]{40}", revision):
        return revision
    with explaining_errors(repo_id, revision, repo_type):
        try:
            info = HfApi().repo_info(repo_id, repo_type=repo_type, revision=revision or default_revision)
        except RevisionNotFoundError:
            if revision is not None or default_revision is None:
                raise
            info = HfApi().repo_info(repo_id, repo_type=repo_type)
    if not info.sha:
        raise ValueError(f"{repo_type} {repo_id}: the Hub named no commit for revision {revision!r}")
    return info.sha


def download_snapshot(repo_id: str, commit: str, *, repo_type: str, **options: Any) -> str:
    """Download a repository at a commit, except for cached files, and return its folder.

    `options` are those of `huggingface_hub.snapshot_download`. Raises ValueError and OSError as `explaining_errors`.
    """
    from huggingface_hub import snapshot_download

    with explaining_errors(repo_id, commit, repo_type):
        return snapshot_download(repo_id, repo_type=repo_type, revision=commit, **options)


def require_model(repo_id: str, file: str) -> None:
    """Check that a file of a model is cached or may be downloaded.

    Libraries that load it would retry for a minute and then explain less than `explaining_errors`.
    """
    from huggingface_hub import HfApi, try_to_load_from_cache

    if not isinstance(try_to_load_from_cache(repo_id, file), str):
        with explaining_errors(repo_id, None, "model"):
            HfApi().auth_check(repo_id)


# ---- errors --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def explaining_errors(repo_id: str, revision: str | None, repo_type: str, *, cached: bool = True) -> Iterator[None]:
    """Convert errors of the Hub client to errors with a remedy.

    Raises ValueError for no such repository or revision, or no access, and OSError if the Hub cannot be reached and,
    with `cached`, the cache does not hold what is wanted.
    """
    import httpx
    from huggingface_hub import errors

    repo = f"{repo_type} {repo_id}"
    page = f"https://huggingface.co/{'datasets/' if repo_type == 'dataset' else ''}{repo_id}"
    login = "set HF_TOKEN to the token of an account that has access, or run `hf auth login`"
    try:
        yield
    except errors.HFValidationError as error:
        raise ValueError(f"{repo}: not a repository name, expected USER/NAME") from error
    except errors.GatedRepoError as error:
        raise ValueError(f"{repo}: gated (403); accept its conditions at {page}, then {login}") from error
    except errors.RevisionNotFoundError as error:
        raise ValueError(f"{repo}: no revision {revision!r} on the Hub; see {page}/tree/main") from error
    except errors.RepositoryNotFoundError as error:
        raise ValueError(
            f"{repo}: not on the Hub, or private (401/404); check the name at {page}; if private, {login}"
        ) from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403):
            raise ValueError(f"{repo}: the Hub refused access ({status}); {login}") from error
        raise OSError(f"{repo}: the Hub answered with an error ({status}); try again later") from error
    except (errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError, httpx.TransportError) as error:
        content = f"revision {revision!r}" if revision else "it"
        lacking = f", and the cache does not hold {content}" if cached else ""
        instead = ", or download it elsewhere and give the folder" if cached else ""
        raise OSError(
            f"{repo}: the Hub cannot be reached{lacking}; check the network and HF_HUB_OFFLINE{instead}"
        ) from error
