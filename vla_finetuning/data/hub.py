"""Resolve revisions, download files and explain errors of the Hugging Face Hub.

Runs on the driver. `huggingface_hub` finds the token itself (`HF_TOKEN` or its token file); errors never contain it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any


def resolve_commit(
    repo_id: str,
    revision: str | None,
    *,
    repo_type: str,
    default_revision: str | None = None,
    cache_dir: str | Path | None = None,
) -> str:
    """Return the commit (40 hexadecimal digits) that a branch or tag names now, so that a run can be repeated exactly.

    A full commit hash is returned as it is. None is `default_revision` where the repository has it, or else its default
    branch. If the Hub cannot be reached, the client warns, and the commit is the one that the cache has under the name.
    Raises ValueError and OSError as `explaining_errors`.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RevisionNotFoundError, RevisionResolutionError

    name, resolve = revision or default_revision, HfApi().resolve_revision
    with explaining_errors(repo_id, revision, repo_type):
        try:
            return resolve(repo_id, repo_type=repo_type, revision=name, cache_dir=cache_dir).resolved
        except RevisionNotFoundError:
            if name == revision:
                raise
        except RevisionResolutionError as error:
            if name == revision:
                raise error.__cause__ or error from None
        return resolve_commit(repo_id, None, repo_type=repo_type, cache_dir=cache_dir)


def download_snapshot(repo_id: str, commit: str, *, repo_type: str, **options: Any) -> str:
    """Download a repository at a commit, except for cached files, and return its folder.

    `options` are those of `huggingface_hub.snapshot_download`. Raises ValueError and OSError as `explaining_errors`.
    """
    import httpx
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import OfflineModeIsEnabled

    download = partial(snapshot_download, repo_id, repo_type=repo_type, revision=commit, **options)
    with explaining_errors(repo_id, commit, repo_type):
        try:
            return download()
        except (OfflineModeIsEnabled, httpx.TransportError):  # a cache of an earlier client has no list of files
            return download(local_files_only=True)


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
    with `cached`, it is not in the local cache.
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
        lacking = f", and {content} is not in the local cache" if cached else ""
        instead = ", or download it elsewhere and give the folder" if cached else ""
        raise OSError(
            f"{repo}: the Hub cannot be reached{lacking}; check the network and HF_HUB_OFFLINE{instead}"
        ) from error
