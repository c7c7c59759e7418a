"""Run by test_costs.py in a process of its own: every function that reads an answer, on long texts of one
piece again and again. `growth` prints the pieces whose CPU time grows faster than their length. For the other
kinds the process has a limit of CPU time: what goes back over a text from each of its places needs hours.
`PYTHONPATH` holds examples/rewards and examples/environments.
"""

import sys
import time
from pathlib import Path

import countdown
import instructions
import json_schema
import texts
import yaml
from instructions import follows

from reward_service.sdk import RewardInput, load_reward
from reward_service.verifiers import answers, latex, programs
from reward_service.verifiers.answers import WHERES, answer_of
from reward_service.verifiers.arithmetic import final_number, number_of
from reward_service.verifiers.text import chosen

PIECES = [
    *"\n \t1a{}[]()\\$*-_<>\"`#'^=,;.!?%~:|&/+é\u00a0",
    *("1,111", "1 ", "1/", "1.", "a ", "- ", "* ", "a'", "x_", "\n ", "\n\n", "\\(", "\\[", "\\{", "$$"),
    *("**", "** ", "*a", "<<", "<a", "[a", "```", "```\n", "``` ", "####", "#### ", "answer", "answer is "),
    *("\\text{", "\\text{1", "\\text {a} ", "\\frac{", "\\frac{1}", "\\boxed", "\\boxed{", "\\boxed "),
    *("\\over ", "\\begin{array}", "\\end{array}", "\\pm ", "\\sin", "\\sin ", "\\le ", "a<", "\\frac<"),
    *("^\\circ", "and ", ", ", "because ", " because", "<think>", "</think>", "<answer>", "</answer>"),
    *("```\n> ", "> ~~~py\n> x\n", "1. ```\n    ```\n", "~~~py ", "    ```\n", "f(x)\n", "def f", "1. "),
    *("1e", "0.\\overline{1", "\\, ", "\\times ", "B ", "B,", "(A)", "Section ", "P.S.", "P. ", "\\ne "),
]  # fmt: skip
ENDS = ("", "x", "!", "1")
STARTS = ("", "1", "\\text{", "$", "answer is ", "```json\n", "\\boxed{", "[", "~~~\n", "> ```\n", "```")
TABLE = yaml.safe_load(Path(__file__).with_name("verdicts.yaml").read_text(encoding="utf-8"))
ARGUMENTS = {name: arguments for name, arguments, _, _ in TABLE["instructions"]}
INSTRUCTIONS = {"instruction_id_list": list(ARGUMENTS), "kwargs": list(ARGUMENTS.values())}
REWARDS = {
    "math": "57",
    "gsm8k": "57",
    "arithmetic": "57",
    f"{countdown.__file__}:countdown": {"target": 10, "numbers": [1, 2, 7]},
    "choice": "B",
    "exact_match": "57",
    f"{texts.__file__}:f1": "57",
    "format_tags": None,
    f"{json_schema.__file__}:json_schema": "true",
    f"{instructions.__file__}:instructions": INSTRUCTIONS,
    f"{texts.__file__}:repetition": None,
}


def read_by_parts(text: str) -> None:
    """Every function by itself, so that what its callers cut off does not save it."""
    for where in WHERES:
        answer_of(text, where)
    latex.tidy(text)
    latex.last_maths(text)
    latex.said_maths(text)
    latex.quantity(latex.one_spaced(text))
    latex.number(text)
    latex.based(text)
    latex.ratio(text)
    answers.hedged(text)
    json_schema.fenced(text)
    programs.program_of(text, defines=["f"])
    chosen(text, {"A": "x", "B": "y"})
    number_of(text, flexible=True)
    final_number(text)
    for instruction, arguments in ARGUMENTS.items():
        follows(text, instruction, arguments)


def read_by_rewards(text: str) -> None:
    for name, truth in REWARDS.items():
        load_reward(name)(RewardInput(response=text, ground_truth=truth, response_tokens=len(text)))


GROWTH, MOST_GROWTH = 4, 9
"""A text that is 4 times as long takes 4 times the work, and 16 times where reading goes back over it."""


def cpu_s(text: str) -> float:
    times = []
    for _ in range(2):
        began_s = time.thread_time()
        read_by_parts(text)
        times.append(time.thread_time() - began_s)
    return min(times)


def growing(size: int) -> list[str]:
    """Return the pieces whose work grows faster than the text. The fastest text's work is the least that
    counts, so that the speed of the machine does not matter. Whatever else runs on the core may disturb one
    measurement, so a piece is named only when two find it."""
    lengths = (size, GROWTH * size)
    texts = {piece: [piece * (length // len(piece)) for length in lengths] for piece in PIECES}
    least_s = min(cpu_s(short) for short, _ in texts.values())
    for _ in range(2):
        texts = {
            piece: [short, long]
            for piece, (short, long) in texts.items()
            if cpu_s(long) > MOST_GROWTH * max(cpu_s(short), least_s)
        }
    return list(texts)


if __name__ == "__main__":
    load_reward("math")(RewardInput(response="x+1", ground_truth="1+x"))
    kind, size = sys.argv[1], int(sys.argv[2])
    if kind == "growth":
        print(growing(size))
        sys.exit()
    for number, piece in enumerate(PIECES):
        body = piece * (size // len(piece))
        if kind == "parts":
            read_by_parts(STARTS[number % len(STARTS)] + body + ENDS[number % len(ENDS)])
            read_by_parts(body + ENDS[(number + 1) % len(ENDS)])
        else:
            read_by_rewards(body + ENDS[number % len(ENDS)])
    print("read")
