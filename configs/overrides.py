"""Dotted overrides: `grpo.num_prompts_per_step=4`. The value is YAML; a whole block can be set; the last one wins."""

from dataclasses import dataclass
from typing import Any, cast

from configs import keys, yaml_text


class OverrideMistake(Exception):
    """An override that cannot be read or names no key."""


@dataclass(frozen=True)
class Override:
    """One setting given beside the recipe file. `text` is fit to be shown: a secret is left out of it."""

    path: str
    value: Any
    text: str

    def covers(self, path: str) -> bool:
        """Whether the value at `path` came from this override."""
        return f"{path}.".startswith(f"{self.path}.")

    def is_within(self, block: str) -> bool:
        """Whether this override set a part of the block; the root block is ""."""
        return not block or self.path.startswith(f"{block}.")


def parse(text: str) -> Override:
    """Read `a.b=value`. A text key takes the value as it stands, so `run.id=0042` needs no quotes."""
    path, equals, raw = text.partition("=")
    path = path.strip()
    if not equals or not path:
        raise OverrideMistake(
            f"`{text}` is not an override: write key=value, for instance grpo.num_prompts_per_step=4."
        )
    key = keys.find(path)
    if key is None and not keys.is_free(path):
        raise OverrideMistake(f"Override `{text}`: {unknown(path)}")
    try:
        value = yaml_text.parse(raw)
    except yaml_text.YamlMistake as mistake:
        raise OverrideMistake(
            f"Override `{text}`: the value is not YAML ({mistake}); put quotes around it."
        ) from mistake
    is_text = key is not None and key.kind in ("text", "path", "secret")
    if is_text and isinstance(value, (bool, int, float)):
        value = raw.strip()
    has_secret = any(other.is_secret and f"{other.path}.".startswith(f"{path}.") for other in keys.all_keys())
    return Override(path, value, f"{path}=..." if has_secret else text)


def apply(override: Override, settings: dict[str, Any]) -> None:
    """Set the value in nested `settings`; missing blocks are made."""
    *blocks, name = override.path.split(".")
    for block in blocks:
        inner: Any = settings.get(block)
        if inner is None:
            inner = settings[block] = {}
        if not isinstance(inner, dict):
            return  # A scalar where a block belongs: validation names it.
        settings = cast(dict[str, Any], inner)
    settings[name] = override.value


def unknown(path: str) -> str:
    """The sentence about a key that does not exist."""
    if "router_replay" in path.split("."):
        return (
            f"unknown key `{path}`: router replay (NeMo-RL's policy.router_replay.enabled) is not supported yet, "
            "because the trainer takes no expert routes from generation. Leave the key out."
        )
    near, parent = keys.nearest(path), path.rpartition(".")[0]
    if near:
        hint = f"Did you mean `{near}`?"
    elif beside := keys.children(parent):
        hint = f"Keys of `{parent}`: {', '.join(key.name for key in beside)}."
    else:
        hint = "`onbelay config schema --markdown` lists all keys."
    return f"unknown key `{path}`. {hint}"
