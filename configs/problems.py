"""What pydantic found, said to a person: where the value came from, its dotted key, the value, and what is expected."""

from collections.abc import Callable, Iterator
from typing import Any, cast

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from configs import keys, overrides

_LONGEST_VALUE = 80


def describe(error: ValidationError, origin: Callable[[str], str]) -> list[str]:
    """One paragraph for each problem. `origin` names the file or the override that gave a key."""
    return [text for detail in error.errors(include_url=False) for text in _describe(detail, origin)]


def _describe(detail: ErrorDetails, origin: Callable[[str], str]) -> Iterator[str]:
    path = ".".join(map(str, detail["loc"]))
    key = keys.find(path)
    if detail["type"] == "extra_forbidden":
        for wrong in _wrong_paths(path, detail["input"]):
            yield f"{origin(wrong)}: {overrides.unknown(wrong)}"
    elif detail["type"] == "missing":
        meaning = f" {key.meaning}" if key else ""
        yield f"{origin(path)}: `{path}` is missing.{meaning}"
    elif detail["type"] == "value_error" and (key is None or key.is_block):
        prefix = f"`{path}`: " if path else ""
        yield f"{origin(path)}: {prefix}{_reason(detail)}."
    else:
        yield f"{origin(path)}: `{path}` is {_shown(detail['input'], key)}, but must be {_expected(path, detail)}."


def _wrong_paths(path: str, value: Any) -> list[str]:
    """An unknown block that resembles none is reported leaf by leaf: NeMo-RL nests some keys differently."""
    near = keys.nearest(path)
    near_key = keys.find(near) if near else None
    if not isinstance(value, dict) or not value or (near_key is not None and near_key.is_block):
        return [path]
    inner = cast(dict[str, Any], value)
    return [wrong for name, leaf in inner.items() for wrong in _wrong_paths(f"{path}.{name}", leaf)]


def _expected(path: str, detail: ErrorDetails) -> str:
    if key := keys.find(path):
        text = key.expected
    elif items := keys.find(path.rpartition(".")[0]):
        text = items.expected.removesuffix("s").replace("a list of", "a")
    else:
        return f"valid ({detail['msg']})"
    return f"{text} ({_reason(detail)})" if detail["type"] == "value_error" else text


def _reason(detail: ErrorDetails) -> str:
    return detail["msg"].removeprefix("Value error, ").rstrip(".")


def _shown(value: Any, key: keys.Key | None) -> str:
    if key is not None and key.is_secret:
        return "set to a value that is not shown"
    if value is None:
        return "empty"
    if isinstance(value, bool):
        return str(value).lower()
    text = repr(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."
