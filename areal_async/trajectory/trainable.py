"""Whether what an episode trains was sampled from what is trained.

The trainer weighs each unit by softmax(logits / temperature) of the weights that it trains, at the
temperature of the call that sampled the unit. A unit that was drawn otherwise, greedily or from a cut
distribution, or whose log-prob is of another temperature, would get a ratio of two different distributions:
a wrong weight, silently.
"""

from __future__ import annotations

from areal_async.trajectory.episode import Episode
from areal_async.trajectory.header import Call


def untrainable(episode: Episode) -> str:
    """Which call of the episode has units to train (mask 1) that were not sampled from what is trained, and
    how they were; empty when there is none. Units with mask 0 are context, sampled in whatever way."""
    offset, length, mask = episode.segments.offset, episode.segments.length, episode.units.mask
    for call in episode.header.calls:
        how = _other_than_trained(call)
        first = offset[call.segment]
        if how and mask[first : first + length[call.segment]].any():
            return f"segment {call.segment} of episode {episode.episode_id} was sampled {how}"
    return ""


def _other_than_trained(call: Call) -> str:
    sampling = call.sampling
    if sampling.temperature <= 0:
        return "greedily (temperature 0)"
    if sampling.top_p != 1:
        return f"with top_p {sampling.top_p:g}"
    if sampling.top_k != 0:
        return f"with top_k {sampling.top_k}"
    if call.logprobs_of == "raw" and sampling.temperature != 1:
        return f"at temperature {sampling.temperature:g}, but its log-probs are those of temperature 1"
    return ""
