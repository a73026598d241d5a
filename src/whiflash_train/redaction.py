"""Secrets are taken out of whatever is stored or logged."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

HIDDEN = "***"

_SECRET_NAME = re.compile(
    r"(^|_)(pass(word|wd|phrase)s?|pwd|secrets?|credentials?|authorization|auth|bearer|cookies?"
    r"|apikeys?|(api|access|private|signing|encryption|ssh|session|master|service|client|account)"
    r"_keys?)(_|$)"
)
_TOKEN_NAME = re.compile(r"(?:^|([a-z0-9]+)_)tokens?$")
# Words before `token` that speak of text. `tokens` alone is a number of them.
_OF_TEXT = {
    *("bos", "eos", "pad", "unk", "mask", "sep", "cls", "bonus", "special", "added", "image"),
    *("first", "last", "next", "start", "end", "stop", "per", "new", "draft", "video", "audio"),
}
_IN_QUERY_ONLY = {"key", "sig", "signature", "code"}
_USER_IN_URL = re.compile(r"(?<=://)[^/\s?#]+(?=@)")
_ASSIGNED = re.compile(
    r"(?P<before>[?&]?)(?P<name>[A-Za-z][\w.-]*)(?P<sign>[\"']?\s*[=:]\s*)"
    r"(?P<value>\"[^\"]+\"|'[^']+'|(?:Bearer |Basic )?[^\s\"',;&{}\[\]]+)"
)
_KNOWN_KEYS = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{20,}|sk-[\w-]{16,}|gh[oprsu]_[A-Za-z0-9]{20,}|AKIA[0-9A-Z]{16})"
    r"|(?<=\bBearer )[\w.~+/=-]+|(?<=\bBasic )[\w+/=]{8,}"
)
_VARIABLE = re.compile(r"[A-Z][A-Z0-9_]*")
_NAMED_VARIABLE = re.compile(r"_env[\"']?\s*[=:]\s*[\"']?(\w+)")
_LEAST_LENGTH = 6  # of a variable's value; "auto" would be found everywhere
_NO_SECRETS = {"pwd", "tokens"}  # the working folder, and a number


def without_secrets(config: Any) -> Any:
    """A copy of a plain configuration, a list or a text, with `***` for what must not be known.

    Hidden are values of keys that are named like secrets, credentials in URLs, and the values of
    environment variables that are named like secrets, or by an `..._env` key. Counts of tokens and
    names of special tokens stay.
    """
    return _cleaned(config, _secret_values(config))


def is_secret_name(name: str) -> bool:
    """Whether a key or variable of that name would hold a secret, if its value is a text."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.rpartition(".")[2])
    words = re.sub(r"[^a-z0-9]+", "_", words.lower())
    if words.endswith("_env") or words in _NO_SECRETS:
        return False
    if _SECRET_NAME.search(words):
        return True
    token = _TOKEN_NAME.search(words)
    return token is not None and token.group(1) not in _OF_TEXT


def _cleaned(value: Any, secrets: list[str]) -> Any:
    if isinstance(value, Mapping):
        return {key: _cleaned_field(str(key), found, secrets) for key, found in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([_cleaned(one, secrets) for one in value])
    return _cleaned_text(value, secrets) if isinstance(value, str) else value


def _cleaned_field(key: str, value: Any, secrets: list[str]) -> Any:
    if is_secret_name(key):
        return _all_hidden(value, numbers=_TOKEN_NAME.search(key.lower()) is None)
    if key.endswith("_env") and isinstance(value, str) and not _VARIABLE.fullmatch(value):
        return HIDDEN  # the key itself, where the name of its variable belongs
    return _cleaned(value, secrets)


def _all_hidden(value: Any, *, numbers: bool) -> Any:
    """numbers: hide them too; a token that is a number is a count or an id."""
    if isinstance(value, Mapping):
        return {key: _all_hidden(found, numbers=numbers) for key, found in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([_all_hidden(one, numbers=numbers) for one in value])
    if value is None or value == "" or isinstance(value, bool):
        return value
    return value if isinstance(value, int | float) and not numbers else HIDDEN


def _cleaned_text(text: str, secrets: list[str]) -> str:
    for secret in secrets:
        text = text.replace(secret, HIDDEN)
    text = _USER_IN_URL.sub(HIDDEN, text)
    text = _ASSIGNED.sub(_cleaned_assignment, text)
    return _KNOWN_KEYS.sub(HIDDEN, text)


def _cleaned_assignment(found: re.Match[str]) -> str:
    name, value = found["name"], found["value"]
    in_query = bool(found["before"]) and name.lower() in _IN_QUERY_ONLY
    if (in_query or is_secret_name(name)) and not _says_nothing(value):
        return f"{found['before']}{name}{found['sign']}{HIDDEN}"
    # What is assigned may hold assignments: engine.urls=http://host/v1?api_key=...
    rest = _ASSIGNED.sub(_cleaned_assignment, value)
    return f"{found['before']}{name}{found['sign']}{rest}"


def _says_nothing(value: str) -> bool:
    return value.lower() in {"null", "none", "true", "false"} or value.startswith("$")


def _secret_values(config: Any) -> list[str]:
    """Of the environment; the longest first, since one may hold another."""
    named = set(_named_variables(config))
    values = {
        value
        for name, value in os.environ.items()
        if (name in named or is_secret_name(name)) and len(value) >= _LEAST_LENGTH
    }
    return sorted(values, key=len, reverse=True)


def _named_variables(config: Any) -> Iterator[str]:
    """Variables that an `..._env` key of the configuration names."""
    if isinstance(config, Mapping):
        for key, value in config.items():
            if str(key).endswith("_env") and isinstance(value, str):
                yield value
            yield from _named_variables(value)
    elif isinstance(config, list | tuple):
        for one in config:
            yield from _named_variables(one)
    elif isinstance(config, str):
        yield from _NAMED_VARIABLE.findall(config)
