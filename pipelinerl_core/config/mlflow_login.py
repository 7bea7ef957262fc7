"""Splits the login off an MLflow URI: no configuration, record, log or look-up of a name contains the login."""

import os
import re
from collections.abc import Iterable
from urllib.parse import unquote

from pipelinerl_core.errors import ConfigError

LOGIN_VARIABLES = ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD")
"""MLflow reads its own variables with every request."""
SETTING = "tracking.mlflow_uri="
_SECTION = re.compile(r"tracking\s*=.*?https?://[^/\s\"']*@", re.IGNORECASE | re.DOTALL)


def split_login(url: str) -> tuple[str, tuple[str, str] | None]:
    """A URL without its login, and user name and password; None without a login, or for another scheme than http."""
    scheme, separator, rest = url.partition("://")
    login, has_login, place = rest.rpartition("@")
    if not has_login or scheme.lower() not in ("http", "https"):
        return url, None
    user, _, password = login.partition(":")
    return f"{scheme}{separator}{place}", (unquote(user), unquote(password))


def take_login(uri: str) -> str:
    """The URI of an MLflow server without user name and password, which go to LOGIN_VARIABLES of this process."""
    uri, login = split_login(uri)
    if login is not None:
        os.environ.update(zip(LOGIN_VARIABLES, login, strict=True))
    return uri


def without_logins(overrides: Iterable[str]) -> tuple[str, ...]:
    """The overrides, which are recorded and shown, without a login (see `take_login`).

    Raises ConfigError for a login in the value of the whole section.
    """
    overrides = tuple(overrides)
    if any(_SECTION.match(override) for override in overrides):
        raise ConfigError(f"tracking={{...}}: a URL has a login. Write {SETTING}URL")
    return tuple(
        SETTING + take_login(override.removeprefix(SETTING).strip("\"'"))
        if override.startswith(SETTING)
        else override
        for override in overrides
    )
