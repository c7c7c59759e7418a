"""Rewards for the tests: batched, of groups, with arguments, with rewards of parts."""

import asyncio
import os
import time
from pathlib import Path

import blake3

from areal_async.base.verdicts import Failure, FaultOf, Parts, Timeout
from reward_service.sdk import RewardInput, Score, reward


@reward
def scaled(given: RewardInput, *, scale: float, offset: float = 0.0):
    return scale * float(given.response) + offset


@reward
async def scaled_later(given: RewardInput, *, scale: float):
    await asyncio.sleep(0.001)
    return scale * float(given.response)


@reward(batch=8)
def many(inputs: list[RewardInput]):
    """Notes how many came together; misbehaves as the responses say."""
    for given in inputs:
        if given.response == "raise":
            raise ValueError("a bad one")
        if given.response == "die":
            os._exit(3)
        if given.response == "hang":
            time.sleep(600)
        if given.response == "short":
            return [1.0]
    if log := inputs[0].extra_info.get("log"):
        with Path(log).open("a") as file:
            file.write(f"{len(inputs)}\n")
    return [float("nan") if given.response == "nan" else float(given.response) for given in inputs]


@reward
def pictures(given: RewardInput):
    """The bytes of all images, if each is named by its digest."""
    named = all(each.digest == f"blake3:{blake3.blake3(each.data).hexdigest()}" for each in given.media)
    return Score(float(named), {each.media_type: float(len(each.data)) for each in given.media})


@reward(scope="group")
def pictures_of_groups(inputs: list[RewardInput]):
    return [pictures(given) for given in inputs]


@reward(scope="group")
def tournament(inputs: list[RewardInput]):
    """The share of the others that each beats."""
    values = [float(given.response) for given in inputs]
    if -1.0 in values:
        os._exit(4)
    return [sum(value > other for other in values) / max(1, len(values) - 1) for value in values]


@reward(scope="group")
async def later(inputs: list[RewardInput]):
    await asyncio.sleep(0.001)
    return [1.0] * len(inputs)


PARTS = {
    "good": Parts(segments={1: 0.5}, agents={"main": 1.0}, units=[0.0, 0.0, 0.0, 0.5, 0.5]),
    "short": Parts(units=[1.0]), "no segment": Parts(segments={7: 1.0}),
    "no agent": Parts(agents={"other": 1.0}), "nan": Parts(segments={0: float("nan")}),
    "type": Parts(units=5), "none": None,
}  # fmt: skip


@reward
def parted(given: RewardInput):
    return Score(1.0, parts=PARTS[given.response])


@reward
def sandboxed(given: RewardInput):
    return {
        "failure": Failure("sandbox", "no isolation", "none"),
        "timeout": Timeout(1500, "namespaces"),
        "score": Score(0.5, sandbox="isolated"),
        "long": Failure("x" * 200, "y"),
    }[given.response]


@reward
def held(given: RewardInput):
    """Takes as long as it says."""
    time.sleep(float(given.extra_info.get("seconds", 0.0)))
    return float(given.response or 0)


def unmarked(given: RewardInput):
    return 1.0


@reward
def blaming(given: RewardInput):
    return Failure("mine", "unreadable", fault=FaultOf(given.response))
