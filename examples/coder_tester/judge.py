"""In training the coder earns whether its program is right, the tester how well its test tells right programs
of the group from wrong ones (`judge`). On held-out tasks each is measured against the truth (`right`).

Where no program of the group is right, no test can be told from one that fails whatever it is given: nobody
earns anything then.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from code_matrix import code_matrix, code_tests, split

from areal_async import Failure, Parts, RewardInput, Score, reward


@reward(scope="group")
def judge(given: list[RewardInput], **limits: Any) -> list[Score] | list[Failure]:
    """As `code_matrix`, whose arguments these are, with the rewards of the two agents as parts."""
    found = code_matrix(given, **limits)
    scores = [one for one in found if isinstance(one, Score)]
    if len(scores) < len(found):
        return found
    some = any(one.components["solution"] for one in scores)
    earned = [
        {"coder": one.components["solution"], "tester": one.components["tests"] * some} for one in scores
    ]
    return [
        msgspec.structs.replace(one, value=sum(each.values()) / 2, parts=Parts(agents=each))
        for one, each in zip(scores, earned, strict=True)
    ]


@reward(scope="group")
def right(
    given: list[RewardInput], *, of: Literal["coder", "tester"], **limits: Any
) -> list[Score | Failure]:
    """1 where the coder's program passes the task's tests, or where the right program, which is the ground
    truth then, passes the tester's test; else 0. `limits` are those of `code_tests`."""
    known: dict[str | None, Score | Failure] = {None: Score(0.0)}
    said = [split(one.response)[of == "tester"] for one in given]
    for one, text in zip(given, said, strict=True):
        if text is not None and text not in known:
            program, tests = (text, one.ground_truth) if of == "coder" else (one.ground_truth, [text])
            asked = RewardInput(response=program, ground_truth=tests)
            known[text] = code_tests(asked, extract="whole", **limits)
    return [known[text] for text in said]


def _prepare(of: str = "", **limits: Any) -> None:
    code_matrix.preload(**limits)  # type: ignore[attr-defined]


judge.preload = right.preload = _prepare  # type: ignore[attr-defined]
