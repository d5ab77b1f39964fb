"""Errors of the generation boundary. All are `infra`: a refit is redone from its start until it succeeds.

While a refit has failed, every endpoint that was reached stays paused; nothing is sampled from weights in between.
"""

from activities.errors import BoundaryError


class ServerUnreachable(BoundaryError):
    """A vLLM endpoint did not answer in time, or the connection broke."""

    boundary = "generation"
    bucket = "infra"


class ServerFailed(BoundaryError):
    """A vLLM endpoint answered with an error."""

    boundary = "generation"
    bucket = "infra"


class WeightsMissing(BoundaryError):
    """The exported weights are not where their record says, or not with the recorded digest."""

    boundary = "generation"
    bucket = "infra"


class WeightsUnfit(BoundaryError):
    """A vLLM endpoint cannot see the weights, or they are not the weights of the model it serves."""

    boundary = "generation"
    bucket = "infra"


class WeightsUnknown(BoundaryError):
    """A vLLM endpoint serves weights that no refit stamped: it was started again and waits for a refit."""

    boundary = "generation"
    bucket = "infra"


class RefitIncomplete(BoundaryError):
    """At least one endpoint did not take the weights; generation stays paused."""

    boundary = "generation"
    bucket = "infra"
