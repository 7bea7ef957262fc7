"""Upload of an exported model directory to the Hugging Face hub."""

from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils._validators import validate_repo_id

from pipelinerl_core.errors import ConfigError, PipelineRLError


def check_login(repository: str) -> None:
    """Raise ConfigError if `repository` is no USER/NAME, or if the hub does not accept the login."""
    try:
        validate_repo_id(repository)
        if "/" not in repository:
            raise HFValidationError("give USER/NAME")
    except HFValidationError as error:
        raise ConfigError(f"--push {repository}: {error}") from None
    try:
        HfApi().whoami()
    except Exception as error:  # noqa: BLE001  (errors of the library and of the network)
        raise ConfigError(f"--push {repository}: {_reason(error)}. Set HF_TOKEN, or run `hf auth login`") from None


def upload(directory: Path, repository: str) -> str:
    """Upload a model directory to a repository, which is created as a private one; returns the repository's page."""
    hub = HfApi()
    try:
        hub.create_repo(repository, private=True, exist_ok=True)
        hub.upload_folder(repo_id=repository, folder_path=directory, commit_message="Export of PipelineRL")
    except Exception as error:  # noqa: BLE001  (errors of the library and of the network)
        raise PipelineRLError(
            f"{directory} is written, but its upload failed: {_reason(error)}. `hf upload {repository} {directory}` "
            "uploads it"
        ) from None
    return f"{hub.endpoint}/{repository}"


def _reason(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "").rstrip(".") or type(error).__name__
