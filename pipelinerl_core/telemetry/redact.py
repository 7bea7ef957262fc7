"""Flattens a configuration for display, and replaces text with the form of a secret."""

import itertools
import re
from collections.abc import Mapping
from typing import Any

REDACTED = "[redacted]"

# Whole words of a key: `max_tokens` is not a secret. Keys that end in `seconds` are excluded below.
_SECRET_WORDS = frozenset(
    {
        "token",
        "secret",
        "secrets",
        "password",
        "passwd",
        "passphrase",
        "credential",
        "credentials",
        "apikey",
        "bearer",
    }
)
_SECRET_PAIRS = frozenset({"api key", "access key", "private key", "secret key", "auth header", "account key"})
_SECRET_PAIRS |= {f"{pair}s" for pair in _SECRET_PAIRS}
_SECRET_VALUE = re.compile(
    r"\b(AKIA|ASIA)[0-9A-Z]{16}\b|\bAIza[\w-]{30,}|\beyJ[\w-]{8,}\.[\w-]{8,}"
    r"|\b(hf|gh[opsu]|github_pat|glpat|sk|xox[abp])[-_][A-Za-z0-9_-]{12,}|\bhooks\.slack\.com/services/\S+"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY|\bBearer\s+\S{8,}|\bAuthorization\W{1,5}Basic\s+\S{8,}"
)
# Bounded, so that the time grows with the length of a text and not with its square.
_URL_LOGIN = re.compile(r"(?P<scheme>[a-zA-Z][\w+.-]{0,30}://)[^/\s]{1,1000}@")
_URL_QUERY = re.compile(
    r"(?i)(?P<name>[?&][^?=&\s]{0,64}(token|secret|signature|password|key|credential)[^?=&\s]{0,64}=)[^&\s]+"
)
_ASSIGNED = re.compile(
    r"(?P<name>\b(?:[A-Z][A-Z0-9_]{0,40}?(?:TOKEN|SECRET|PASSWORD|KEY)[A-Z0-9_]{0,20}="
    r"|(?i:[\w-]{0,40}?(?:secret|password|api_?key|access_?key)[\w-]{0,20}[\"']?\s{0,3}[=:]\s{0,3}))[\"']?)"
    r"[^\s\"',;&)\]}\[$]{8,}"
)
"""NAME=value of an environment variable, or `password: value`, `'api_key': 'value'`; not `max_tokens=12345678`."""


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Dotted key -> text. Example: {"trainer": {"steps": 3}} -> {"trainer.steps": "3"}."""
    flat: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = str(value)
    return flat


def redact(flat: Mapping[str, str]) -> dict[str, str]:
    """The mapping with secrets replaced, recognised by the key, by the form of the value, or inside URLs."""
    return {key: REDACTED if _is_secret_key(key) and value else redact_text(value) for key, value in flat.items()}


def redact_text(text: str) -> str:
    """The text with logins and signatures in URLs, and well-known forms of keys, replaced."""
    text = _URL_LOGIN.sub(rf"\g<scheme>{REDACTED}@", text)
    text = _URL_QUERY.sub(rf"\g<name>{REDACTED}", text)
    text = _ASSIGNED.sub(rf"\g<name>{REDACTED}", text)
    return _SECRET_VALUE.sub(REDACTED, text)


def _is_secret_key(key: str) -> bool:
    words = re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+", key)
    words = [word.lower() for word in words]
    if words and words[-1] == "seconds":
        return False
    pairs = {f"{first} {second}" for first, second in itertools.pairwise(words)}
    return bool(_SECRET_WORDS.intersection(words) or _SECRET_PAIRS & pairs)
