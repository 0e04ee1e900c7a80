"""Failures of downloads from a hub, each as one sentence with what to do."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

import httpx2
from huggingface_hub import constants, get_token
from huggingface_hub.errors import (
    DisabledRepoError,
    EntryNotFoundError,
    FileMetadataError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
    RevisionResolutionError,
)

from common.models.disk import explain_disk

if TYPE_CHECKING:
    from common.models.references import HubReference

# What calls of `huggingface_hub` raise for reasons other than our own mistakes.
FAILURES: Final = (
    OSError,
    httpx2.HTTPError,
    EntryNotFoundError,
    RevisionResolutionError,
    HFValidationError,
)
_TOKENS: Final = "https://huggingface.co/settings/tokens"


def is_unreachable(error: BaseException) -> bool:
    """Whether the hub could not be asked: no network, offline mode, or the server is down."""
    cause = _cause(error)
    if isinstance(cause, HfHubHTTPError):
        return cause.response.status_code >= 500
    return isinstance(cause, httpx2.TransportError | OfflineModeIsEnabled | LocalEntryNotFoundError)


def explain(error: BaseException, reference: HubReference) -> str:
    """Describe the failure of the model `reference` and its remedy in a sentence."""
    cause = _cause(error)
    if isinstance(cause, HfHubHTTPError):
        return f"model {reference}: {_refusal(cause, reference)}"
    cache = constants.HF_HUB_CACHE
    match cause:
        case OfflineModeIsEnabled() | LocalEntryNotFoundError() if constants.HF_HUB_OFFLINE:
            problem = (
                f"it is not completely in the cache ({cache}), and HF_HUB_OFFLINE forbids a download; unset it, or run "
                f"`pando models pull {reference}` where there is a network and copy the cache"
            )
        case httpx2.TransportError() | LocalEntryNotFoundError():
            problem = (
                f"{constants.ENDPOINT} cannot be reached ({_first_line(cause)}), and the model is not completely in "
                f"the cache ({cache}); check network and proxy, or set HF_ENDPOINT to a mirror"
            )
        case HFValidationError():
            problem = f"not a valid name on the hub: {_first_line(cause)}"
        case FileMetadataError():
            problem = f"{constants.ENDPOINT} does not answer as a hub does; check HF_ENDPOINT and proxies"
        case _:
            problem = (
                explain_disk(cause, Path(cache))
                or f"the download failed: {_first_line(cause)}; run the command again, it continues"
            )
    return f"model {reference}: {problem}"


def _refusal(error: HfHubHTTPError, reference: HubReference) -> str:
    """Describe an error status of the hub in a sentence."""
    page = f"{constants.ENDPOINT}/{reference.repository}"
    status = error.response.status_code
    has_token = get_token() is not None
    match error:
        case GatedRepoError() if has_token:
            return f"the repository is gated, and your token has no access: accept its licence at {page}"
        case GatedRepoError():
            return (
                f"the repository is gated: accept its licence at {page}, create a token with read access at {_TOKENS}, "
                "and set HF_TOKEN to it"
            )
        case RepositoryNotFoundError():
            return _absence(reference, has_token=has_token)
        case RevisionNotFoundError():
            return f"the repository has no revision {reference.revision!r}; see {page}/refs for its branches and tags"
        case RemoteEntryNotFoundError():
            return f"a file that the hub lists is missing ({error.response.url.path}); try again or name a revision"
        case DisabledRepoError():
            return f"the hub has disabled this repository; see {page}"
    match status:
        case 401 | 403:
            return _rejection(status, has_token=has_token)
        case 429:
            return "the hub limits your rate (429); try again in some minutes, or set HF_TOKEN for a higher limit"
        case _:
            return f"{constants.ENDPOINT} answers with status {status}; try again later"


def _absence(reference: HubReference, *, has_token: bool) -> str:
    hub = constants.ENDPOINT
    if "/" not in reference.repository:
        return (
            f"neither a bundled model, a local path nor a model at {hub}; but for the oldest, models there are named "
            "organisation/repository"
        )
    if has_token:
        return (
            f"neither a local path nor a model at {hub} that your token can read; check the name and the token's "
            "permissions"
        )
    return f"neither a local path nor a public model at {hub}; check the name, or set HF_TOKEN if the model is private"


def _rejection(status: int, *, has_token: bool) -> str:
    if has_token:
        return f"the hub rejects your token ({status}); create one at {_TOKENS} and set HF_TOKEN to it"
    return (
        f"{constants.ENDPOINT} refuses access ({status}); check HF_ENDPOINT and proxies, or create a token at "
        f"{_TOKENS} and set HF_TOKEN to it"
    )


def _cause(error: BaseException) -> BaseException:
    """Return the error that the library's own errors about the cache were raised from."""
    while isinstance(error, LocalEntryNotFoundError | RevisionResolutionError) and error.__cause__ is not None:
        error = error.__cause__
    return error


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
