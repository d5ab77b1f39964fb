"""What an operator may ask of a step: to run a dropped group again while the step is open. Pure."""

from workflows.closing import Places
from workflows.levers import Decision, done, refused


def decide_retry(step: int, group_id: str, group_prefix: str, places: Places, *, draining: bool) -> Decision:
    """Run a dropped group again. It must be one of this step's, and its place must be free."""
    if not group_id.startswith(group_prefix):
        return refused("unknown", f"{group_id} is no group of step {step}; its groups are {group_prefix}N")
    if places.closed:
        return refused(
            "closed",
            f"step {step} is closed: its groups are settled for good. `onbelay group replay {group_id}` runs a copy "
            "that is never trained",
        )
    if group_id in places.without_signal:
        return refused(
            "set_aside",
            f"{group_id} was set aside, its rewards are all equal: the evidence stands and another prompt takes its "
            f"place. `onbelay group replay {group_id}` runs a copy that is never trained",
        )
    found = places.dropped.get(group_id)
    if found is None:
        return refused(
            "not dropped",
            f"{group_id} is not dropped; only a dropped group is retried by its step, a parked one by its own retry",
        )
    if draining:
        return refused(
            "dropped", f"the run stops before step {step} trains; {group_id} runs again when the run is resumed"
        )
    place = places.places[found.place]
    if place.state != "lost":
        taken = "is being looked for" if place.state == "seeking" else "has its place already"
        return refused(
            "dropped", f"{group_id} was dropped and another group {taken} (failure.on_dropped_prompt=replace)"
        )
    last = place.group
    if last is not None and last.group_id != group_id:
        return refused(
            "dropped", f"{group_id} gave its place to {last.group_id}, which was dropped, too: retry that one"
        )
    return done("open", f"{group_id} runs its lost rollouts again in step {step}")
