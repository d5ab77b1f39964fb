"""`${NAME}` in the values of secret keys is replaced by an environment variable, so that no recipe holds a secret."""

import re
from collections.abc import Mapping

_REFERENCE = re.compile(r"\$\$\{|\$\{([A-Za-z_][A-Za-z0-9_]*)\}")


class MissingVariable(Exception):
    """The environment has no variable of this name."""


def expand(value: str, environment: Mapping[str, str]) -> str:
    """Replace each `${NAME}`; `$${` stands for `${` itself."""

    def replacement(match: re.Match[str]) -> str:
        name = match.group(1)
        if name is None:
            return "${"
        if not environment.get(name):
            raise MissingVariable(name)
        return environment[name]

    return _REFERENCE.sub(replacement, value)


def escape(value: str) -> str:
    """The text that `expand` turns into `value`."""
    return value.replace("${", "$${")
