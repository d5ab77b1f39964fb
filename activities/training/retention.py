"""Which checkpoints and exported weights are kept: the newest, and checkpoints at the milestones of the run. Pure."""

from collections.abc import Collection, Mapping


def expendable_checkpoints(recorded: Collection[int], usable: Collection[int], last: int, every: int) -> list[int]:
    """Versions whose checkpoints are not kept, oldest first.

    Kept are the `last` newest usable ones and every version that `every` divides (0: none), for good. One that cannot
    be used at the moment stays as long as it is not older than those.
    """
    newest = sorted(usable)[-last:]
    if not newest:
        return []
    return sorted(version for version in recorded if version < newest[0] and not _is_milestone(version, every))


def expendable_weights(exports: Mapping[str, tuple[int, int]], current: str, last: int) -> list[str]:
    """Names of exports that are not kept, in order. `exports`: name -> (version, token of the trainer that wrote it).

    Kept are the `last` newest versions, and of each the export of the newest trainer; `current` in any case, and
    nothing that a later trainer than its own wrote is touched.
    """
    _, own_token = exports[current]
    versions = sorted({version for version, _ in exports.values()})[-last:]
    newest = {version: max(token for other, token in exports.values() if other == version) for version in versions}
    return sorted(
        name
        for name, (version, token) in exports.items()
        if name != current and token <= own_token and newest.get(version) != token
    )


def _is_milestone(version: int, every: int) -> bool:
    return every > 0 and version % every == 0
