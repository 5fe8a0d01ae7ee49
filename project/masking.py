"""Which values of a configuration are secrets, and what stands for them wherever a configuration is written down or shown.

The real ones are kept by a run's config.yaml alone, which then only its owner can read.
"""

import re
from collections.abc import Mapping
from typing import Any

MASK = "(secret)"
_NAMES = re.compile(
    r"(^|_)(api_?key|access_?key|secret|token|passwd|password|credentials?|private_?key|auth)(_|$)", re.IGNORECASE
)
_NO_SECRETS = re.compile(
    r"(num|max|min|n|pad|eos|bos|unk|mask|sep|cls)_tokens?|tokens?_(id|ids|count|size|type\w*)", re.IGNORECASE
)
_IN_ADDRESSES = re.compile(r"(//)[^/\s]*@")  # the last @ of what comes before a path
_IN_QUERIES = re.compile(r"(?i)([?&](?:api_?key|access_?key|secret|token|password|auth|sig|signature|key)=)[^&\s]+")


def masked_text(text: str) -> str:
    """Returns a text without the passwords and tokens of the addresses in it."""
    return _IN_QUERIES.sub(rf"\1{MASK}", _IN_ADDRESSES.sub(r"\1", text))


def masked(value: Any, name: str = "") -> Any:
    """Returns the same configuration, with a mask for each secret in it."""
    if isinstance(value, Mapping):
        return {key: masked(item, str(key)) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [masked(item, name) for item in value]
    if not isinstance(value, str) or not value:
        return value
    return MASK if _NAMES.search(name) and not _NO_SECRETS.search(name) else masked_text(value)
