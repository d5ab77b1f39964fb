"""The one error of the launcher: its text tells a person which key or port is wrong and what to do."""


class GymStartError(Exception):
    """The Gym servers of a recipe cannot be started."""
