"""Takes secrets out of what leaves the machine: the values of a recipe's secret keys, user information in URLs, and
authorization headers. Pure; everything else stays as it is.
"""

import base64
import binascii
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any, cast
from urllib.parse import unquote, urlsplit

from pydantic import SecretStr

from configs.base import Section
from configs.recipe import Recipe

REMOVED = "[removed]"
_SHORTEST_PASSWORD = 4  # a shorter one is only removed where it stands in a URL
_USER_INFORMATION = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://)[^/\s\"'<>@]*(?:@[^/\s\"'<>@]*)*@")
_HEADER = re.compile(
    r"(?i)((?:proxy-)?authorization|x-api-key|api-key)([\"']?\s*[:=]\s*[\"']?)(?:(bearer|basic|token|digest)\s+)?[^\s\"',;}]+"
)
_BEARER = re.compile(r"(?i)\bbearer\s+[A-Za-z0-9._~+/=-]{8,}")
_SECRET_NAME = re.compile(r"(?i)^(.*[_-])?(api[_-]?key|token|password|passwd|secret|authorization|credentials?|dsn)$")


class Redactor:
    """Knows the secrets of the given recipes."""

    def __init__(self, recipes: Iterable[Recipe]) -> None:
        found = {secret for recipe in recipes for secret in _secrets(recipe) if secret}
        self._secrets = sorted(found, key=len, reverse=True)

    def text(self, text: str) -> str:
        """The text without secrets."""
        for secret in self._secrets:
            text = text.replace(secret, REMOVED)
        text = _USER_INFORMATION.sub(rf"\1{REMOVED}@", text)
        text = _HEADER.sub(rf"\1\2{REMOVED}", text)
        return _BEARER.sub(f"Bearer {REMOVED}", text)

    def value(self, value: Any) -> Any:
        """JSON without secrets, keys included. Temporal's payloads are looked into."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, list):
            return [self.value(item) for item in cast(list[Any], value)]
        if isinstance(value, dict):
            block = cast(dict[str, Any], value)
            if set(block) >= {"metadata", "data"} and isinstance(block["data"], str):
                return {**block, "data": self._payload(block["data"])}
            return {
                self.text(name): REMOVED if _is_secret(name, inner) else self.value(inner)
                for name, inner in block.items()
            }
        return value

    def _payload(self, data: str) -> str:
        """A payload in base64; what is not text stays as it is."""
        try:
            plain = base64.b64decode(data, validate=True).decode()
        except (binascii.Error, UnicodeDecodeError):
            return data
        try:
            cleaned = json.dumps(self.value(json.loads(plain)), separators=(",", ":"))
        except json.JSONDecodeError:
            cleaned = self.text(plain)
        return base64.b64encode(cleaned.encode()).decode()


def _is_secret(name: str, value: object) -> bool:
    return isinstance(value, str) and _SECRET_NAME.match(name) is not None


def _secrets(value: Any) -> Iterator[str]:
    """Every secret of a recipe, as it is written and as part of a URL."""
    if isinstance(value, SecretStr):
        secret = value.get_secret_value()
        yield secret
        yield from _passwords(secret)
    elif isinstance(value, Section):
        for name in type(value).model_fields:
            yield from _secrets(getattr(value, name))
    elif isinstance(value, dict):  # settings of Gym's own servers
        for name, inner in cast(dict[str, Any], value).items():
            if isinstance(inner, str) and _is_secret(str(name), inner):
                yield inner
            yield from _secrets(inner)
    elif isinstance(value, (list, tuple)):
        for inner in cast(list[Any], value):
            yield from _secrets(inner)


def _passwords(url: str) -> Iterator[str]:
    """The password of a URL, as it stands there and decoded."""
    try:
        password = urlsplit(url).password
    except ValueError:
        return
    if password and len(password) >= _SHORTEST_PASSWORD:
        yield password
        yield unquote(password)
