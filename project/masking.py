"""Masks the secrets in a configuration, wherever it is written down or shown; config.yaml alone keeps them, for its owner.

What a module keeps by `save_hyperparameters` goes by the same rules where a checkpoint is written.
"""

import json
import re
import shlex
from collections.abc import Sequence
from copy import copy
from typing import TypeVar, cast

import yaml

T = TypeVar("T")

MASK = "(secret)"
_NAMES = re.compile(
    r"(^|_)(api_?key|access_?key|secret|token|passwd|password|credentials?|private_?key|auth)(_|$)", re.IGNORECASE
)
_NO_SECRETS = re.compile(
    r"(num|max|min|n|pad|eos|bos|unk|mask|sep|cls)_tokens?|tokens?_(id|ids|count|size|type\w*)", re.IGNORECASE
)
_SPECIAL = re.compile(r"[<\[{(|].*[>\]})|]|.{0,2}", re.DOTALL)  # a tokenizer's: <pad>, [CLS], <|endoftext|>
_IN_ADDRESSES = re.compile(r"(//)[^/\s]*@")  # the last @ of what comes before a path
_IN_QUERIES = re.compile(r"(?i)([?&](?:api_?key|access_?key|secret|token|password|auth|sig|signature|key)=)[^&\s]+")


def masked_text(text: str) -> str:
    """Returns a text without the passwords and tokens of the addresses in it."""
    return _IN_QUERIES.sub(rf"\1{MASK}", _IN_ADDRESSES.sub(r"\1", text))


def masked(value: T) -> T:
    """Returns the same configuration, with a mask for each secret in it."""
    return cast(T, without_secrets(value, set()))


def without_secrets(value: object, names: set[str], name: str = "") -> object:
    """Returns the same object, or, where it has secrets, a copy of its kind with masks; adds their names to `names`."""
    if isinstance(value, str):
        new = masked_text(value)
        if value and _NAMES.search(name) and not _NO_SECRETS.search(name):
            new = value if "token" in name.lower() and _SPECIAL.fullmatch(value) else MASK
        names |= {name} if new != value else set()
        return new if new != value else value
    if isinstance(value, dict):
        items = {key: without_secrets(item, names, str(key)) for key, item in value.items()}
        changed = {key: item for key, item in items.items() if item is not value[key]}
        if changed:
            value = copy(value)
            value.update(changed)
    elif isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        parts = [without_secrets(item, names, name) for item in value]
        if any(new is not old for new, old in zip(parts, value, strict=True)):
            return type(value)(parts)
    return value


def masked_command(words: Sequence[str]) -> str:
    """Returns a command line as a shell takes it, with a mask for each secret, also in the YAML of a value."""
    shown, key = [], ""
    for argument in words:
        name, equals, value = argument.partition("=")
        flag = argument.startswith("-")
        if flag and equals:
            shown.append(f"{name}={_masked_value(name, value)}")
        else:
            shown.append(argument if flag else _masked_value(key, argument))
        key = argument if flag and not equals else ""
    return shlex.join(shown)


def _masked_value(name: str, value: str) -> str:
    key = name.rpartition(".")[2].lstrip("-").replace("-", "_")
    if (text := masked({key: value})[key]) != value:
        return str(text)
    if not value.startswith(("{", "[")):
        return value
    try:
        parsed = yaml.safe_load(value)
    except (yaml.YAMLError, ValueError, RecursionError):
        return MASK  # what is no YAML may hold anything
    return value if (hidden := masked({key: parsed})[key]) == parsed else json.dumps(hidden, default=str)
