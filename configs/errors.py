"""The one error of this package: what is wrong with a recipe, one paragraph for each problem, all of them at once."""

from collections.abc import Sequence


class ConfigError(Exception):
    """A recipe that cannot be used. Each problem names the file or override, the key, and what to do."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n\n".join(problems))
        self.problems = tuple(problems)
