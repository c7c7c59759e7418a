"""When a group has become too old for a step, under the policy for what is overtaken."""

from __future__ import annotations

from replay_buffer.ledger.records import NO_VERSION, Group
from replay_buffer.ledger.rules import Rules


def lowest_version(rules: Rules, step: int) -> int:
    """The oldest version that `step` may train."""
    return step - rules.max_staleness


def masked_below(rules: Rules, step: int) -> int:
    """The version below which the trainer masks units in `step`; 0 where it masks none."""
    return max(0, lowest_version(rules, step)) if rules.overtaken_masks else 0


def too_old(rules: Rules, group: Group, step: int) -> bool:
    """Whether `step`, and every later one, must do without the group: it holds a unit below the step's lowest
    version; or, where such units are masked, nothing else, and nothing is to come."""
    lowest = lowest_version(rules, step)
    if group.min_version == NO_VERSION or group.min_version >= lowest:
        return False
    if not rules.overtaken_masks:
        return True
    return not group.missing and all(episode.max_version < lowest for episode in group.episodes)
