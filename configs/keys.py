"""Every dotted key of the configuration, read from the schema, so that messages and documentation agree with it."""

from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from typing import Any, cast

from configs.recipe import Recipe

Schema = dict[str, Any]

PLACEHOLDER = "NAME"


@dataclass(frozen=True)
class Key:
    """One key. `path` has PLACEHOLDER where the user chooses a name (`gym.servers.NAME.type`)."""

    path: str
    kind: str
    expected: str
    default: str
    meaning: str
    is_block: bool
    is_secret: bool

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rpartition(".")[2]


@cache
def all_keys() -> tuple[Key, ...]:
    """Blocks and leaves, in the order of the schema."""
    schema = Recipe.model_json_schema()
    return tuple(_walk(schema, schema["$defs"], ""))


def find(path: str) -> Key | None:
    """The key that a dotted path names; names the user chooses match the placeholder."""
    return next((key for key in all_keys() if _matches(key.path, path)), None)


def is_free(path: str) -> bool:
    """Whether the path lies in a block whose content is not Onbelay's (`gym.servers.NAME.config`)."""
    parts = path.split(".")
    parents = (".".join(parts[:count]) for count in range(1, len(parts)))
    return any((key := find(parent)) is not None and key.kind == "mapping" for parent in parents)


def nearest(path: str) -> str | None:
    """The valid key most like a wrong one: beside it, then of the same name elsewhere, then by the whole path."""
    parent, _, name = path.rpartition(".")
    beside = _closest(name, {key.name: f"{parent}.{key.name}" for key in children(parent)}, 0.6) if parent else None
    by_name = {key.name: key.path for key in reversed(all_keys()) if PLACEHOLDER not in key.path}
    by_path = {} if children(parent) else {key.path: key.path for key in all_keys()}
    return beside or _closest(name, by_name, 0.8) or _closest(path, by_path, 0.65)


def children(path: str) -> list[Key]:
    """The keys of a block."""
    return [key for key in all_keys() if "." in key.path and _matches(key.path.rpartition(".")[0], path)]


def _closest(wrong: str, keys: dict[str, str], cutoff: float) -> str | None:
    matches = get_close_matches(wrong, keys, n=1, cutoff=cutoff)
    return keys[matches[0]] if matches else None


def _matches(pattern: str, path: str) -> bool:
    patterns, parts = pattern.split("."), path.split(".")
    return len(patterns) == len(parts) and all(
        want in (PLACEHOLDER, part) for want, part in zip(patterns, parts, strict=True)
    )


def _walk(node: Schema, definitions: Schema, prefix: str) -> Iterator[Key]:
    required = node.get("required", [])
    for name, field in cast(dict[str, Schema], node["properties"]).items():
        path = f"{prefix}{name}"
        target = _target(field, definitions)
        is_block = "properties" in target
        yield Key(
            path=path,
            kind="block" if is_block else _kind(target, definitions),
            expected=_expected(field, target, definitions),
            default=_default(field, target, is_required=name in required),
            meaning=field.get("description", ""),
            is_block=is_block,
            is_secret=target.get("format") == "password",
        )
        if is_block:
            yield from _walk(target, definitions, f"{path}.")
        values = target.get("additionalProperties")
        if isinstance(values, dict):
            yield from _walk_values(cast(Schema, values), definitions, f"{path}.{PLACEHOLDER}")


def _walk_values(values: Schema, definitions: Schema, path: str) -> Iterator[Key]:
    target = _target(values, definitions)
    kind = "block" if "properties" in target else _kind(target, definitions)
    expected = _expected(values, target, definitions)
    yield Key(path, kind, expected, "", target.get("description", ""), is_block="properties" in target, is_secret=False)
    if "properties" in target:
        yield from _walk(target, definitions, f"{path}.")


def _target(field: Schema, definitions: Schema) -> Schema:
    """The schema behind a reference or an optional value."""
    options = [option for option in field.get("anyOf", []) if option.get("type") != "null"]
    if len(options) == 1:
        field = options[0]
    if "$ref" in field:
        return definitions[field["$ref"].rpartition("/")[2]]
    return field


def _kind(target: Schema, definitions: Schema) -> str:
    """One word or two for the type of a leaf."""
    if "enum" in target:
        return "choice"
    match target.get("type"), target.get("format"):
        case "string", "path":
            return "path"
        case "string", "uri":
            return "URL"
        case "string", "password":
            return "secret"
        case "string", _:
            return "text"
        case "boolean", _:
            return "true or false"
        case "array", _:
            return f"list of {_kind(_target(target['items'], definitions), definitions)}s"
        case "object", _:
            values = target.get("additionalProperties")
            return "mapping" if values in (True, None) else "names"
        case kind, _:
            return str(kind)


def _expected(field: Schema, target: Schema, definitions: Schema) -> str:
    """What a valid value is, in words."""
    if "properties" in target:
        text = "a block of keys"
    elif "enum" in target:
        text = "one of " + ", ".join(map(str, target["enum"]))
    else:
        kind = _kind(target, definitions)
        text = {"integer": "an integer", "names": "a block of names and values", "mapping": "a block"}.get(
            kind, kind if kind == "true or false" else f"a {kind}"
        )
    bounds = [
        f"{words} {target[key]}"
        for key, words in (
            ("minimum", "at least"),
            ("exclusiveMinimum", "above"),
            ("maximum", "at most"),
            ("exclusiveMaximum", "below"),
        )
        if key in target
    ]
    if "pattern" in target:
        bounds.append(f"of the form {target['pattern'].strip('^$')}")
    if target.get("minLength") and target.get("format") != "uri":
        bounds.append("not empty")
    text = ", ".join([text, *bounds])
    return f"{text}, or null" if any(option.get("type") == "null" for option in field.get("anyOf", [])) else text


def _default(field: Schema, target: Schema, *, is_required: bool) -> str:
    if "properties" in target and field.get("default", {}) is not None:
        return ""
    if is_required:
        return "required"
    match field.get("default"):
        case None:
            return "null" if "default" in field else "{}"
        case bool(flag):
            return str(flag).lower()
        case float(number):
            return f"{number:g}" if 0 < number < 1e-3 else repr(number)
        case other:
            return str(other)
