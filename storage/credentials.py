"""Keeping passwords and keys out of messages, whoever writes the message."""

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

# What stands between a colon and the last "@" of a URL's host part. A bucket has no port, and keys may hold slashes.
_PASSWORD = re.compile(r"(?<=://)([^/:@]*):([^/]*)@")
_BUCKET_PASSWORD = re.compile(r"(?<=://)([^/:@]*):([^@]*)@")
_BUCKET_SCHEMES = ("s3", "s3a")

_SECRET_NAME = re.compile(r"key|secret|token|password|passwd|credential|connection_string|signature|sas", re.IGNORECASE)
# Shorter ones are everyday words, such as the name of a test's account, and no secrets.
_SHORTEST_SECRET = 8

_HIDDEN = "***"


class Credentials:
    """What a URL, the options and the environment hold that must not be shown.

    Attributes:
        url: the URL without its password; that of a bucket also without the user, which is half of a key.
        user: what stands before the password in the URL; empty if there is no password.
        password: the password.
    """

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        bucket = url.partition("://")[0] in _BUCKET_SCHEMES
        pattern = _BUCKET_PASSWORD if bucket else _PASSWORD
        found = pattern.search(url)
        self.user, self.password = found.groups() if found else ("", "")
        self.url = pattern.sub("" if bucket else r"\1@", url)
        secrets = {*_secrets_of(options), *_secrets_of(os.environ)}
        # The longest first, as one may be a part of another.
        self._secrets = sorted({self.password, unquote(self.password), *secrets} - {""}, key=len, reverse=True)

    def hide(self, text: str) -> str:
        """Return a text without them."""
        for secret in self._secrets:
            text = text.replace(secret, _HIDDEN)
        return text

    def told_by(self, error: BaseException) -> bool:
        """Tell whether an error, or one behind it, says any of them."""
        seen: BaseException | None = error
        while seen is not None:
            text = f"{seen} {seen.args}"
            if any(secret in text for secret in self._secrets):
                return True
            seen = seen.__cause__ or seen.__context__
        return False


def _secrets_of(options: Mapping[str, Any], named: bool = False) -> Iterator[str]:
    for name, value in options.items():
        secret = named or _SECRET_NAME.search(str(name)) is not None
        if isinstance(value, Mapping):
            yield from _secrets_of(value, secret)
        elif secret and len(str(value)) >= _SHORTEST_SECRET:
            yield str(value)
