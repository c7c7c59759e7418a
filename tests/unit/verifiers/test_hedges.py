"""Answers that hold the right number and say something else: none of them is right."""

import pytest
from instructions import follows
from verifiers import COUNTDOWN, JSON_SCHEMA, judged

from reward_service.sdk import RewardInput, load_reward

MATHS = {
    "5": [
        r"\neq 5", r"\ne 5", "≠ 5", "!=5", r"\not=5", r"\not 5", r"\neg 5", r"\ge 5", "≥5", "> 5",
        r"\lt 5", "<5", r"\gg 5", r"\ll 5", r"\lesssim 5", r"\gtrsim 5", r"\nless 5", r"\ngtr 5",
        r"\propto 5", r"\sim 5", "[5]", r"\left[5\right]", r"\langle 5\rangle", "[5,5]", "[5;6]",
        r"x \ne 5", r"x\neq5", "x > 5", r"x \notin 5", r"5 \text{ or six}", r"5 \text{(or six)}",
        r"5 \text{ or } 6", r"5 \text{ maybe six}", "5 six", "5 to 6", r"5\text{six}",
        r"5 \text{ or more}", r"5 \text{ dozen}", "5 hundred", r"5 \text{ thousand}", "5 and 6",
        r"5\text{ minus one}", r"5 \text{ plus one}", r"5\text{ is wrong}", r"5 \text{ no wait six}",
        "not 5", r"\text{not }5", r"\text{at least } 5", r"5 \approx 6", r"5 = 6", r"5 \mod 6",
        r"5 \pmod{6}", r"5 \pm 1", "5'", "5k", "5x", "5i", r"5\pi", "5!", "5^2", "5e1", "5-6", "5–6",
        "5..6", "5:30", "5/6", r"5\frac12", "5 1/2", "5, 6", r"\{5,6\}", r"5 \lor 6", r"5 \cup 6",
        r"5 \to 6", r"5\Rightarrow 6", r"x=5, x=6", r"5\\6", "4.9999999", "5.0000001", "5.00001",
        r"\frac{0}{0}", r"x \in \{5,6\}", "five or six", r"\text{5 or 6}",
        r"\begin{pmatrix}5\end{pmatrix}", r"5 | 6", r"5\ 6",
    ],
    "12345670": ["12345678.0", "12345671.0", "12345678e0", "1.2345678e7"],
    "1000004": ["1e6", "1.0e6", "1000000.0", r"10^6", r"1.0\times 10^6"],
    "0.5": [r"\neq 0.5", "> 0.5", "[0.5]", r"0.5 \text{ or one}", "0.5 or 1"],
    r"\frac{1}{2}": [r"\neq\frac{1}{2}", r"\ge \frac{1}{2}", r"[\frac12]", r"\frac{1}{2}\text{ or one}"],
    "x^2+1": [r"\neq x^2+1", r"[x^2+1]", "x^2+1 > 0", r"x^2+1\text{ or zero}", r"\not= x^2+1"],
    "x=5": [r"x \ne 5", r"x\not=5", r"x \ge 5", r"y = 5", r"x \approx 6"],
    "(1,2)": ["[1,2]", r"\ne (1,2)", r"x \notin (1,2)", r"(1,2)\cup(3,4)"],
    "[1,2]": ["(1,2)", "1 < x < 2", r"x \notin [1,2]", r"x<1 \text{ or } x>2"],
    "x>3": [r"x \ge 3", "x<3", "3", r"x \ngtr 3", r"\neg(x>3)"],
    r"12\text{ cm}": [r"12\text{ m}", r"12 \text{ cm or m}"],
    r"\text{even}": ["odd", "not even", r"\text{even or odd}"],
}  # fmt: skip


@pytest.mark.parametrize("truth", MATHS)
def test_an_answer_that_says_more_than_the_truth_is_wrong(truth):
    assert [answer for answer in MATHS[truth] if judged(truth, rf"\boxed{{{answer}}}") != 0] == []


RIGHT = [
    ("5", r"= 5"), ("5", r"\approx 5"), ("5", r"2+3=5"), ("5", r"5 \text{ apples}"), ("5", "5.0"),
    ("5", "5000e-3"), ("3.14159", r"\pi \approx 3.14159"), ("(3,\\infty)", "x>3"),
    (r"[1,2]", r"1 \le x \le 2"), ("6", "3!=6"), ("(-2,2)", "-2<x<2"), ("x>3", "3<x"),
    (r"(-\infty,-1)\cup(1,\infty)", "x<-1 or x>1"), ("-1", r"e^{i\pi}"), (r"x \ne 3", r"x \neq 3"),
    (r"x \ne 3", "x != 3"), (r"f'(x)=2x", r"f'(x)=2x"), ("12", r"12 \text{ dollars per hour}"),
    ("0.333333", r"\frac{1}{3}"), ("1000000", "1e6"),  ("5", "5_6"),
]  # fmt: skip


@pytest.mark.parametrize(("truth", "answer"), RIGHT)
def test_the_same_signs_where_they_change_nothing_leave_an_answer_right(truth, answer):
    assert judged(truth, rf"\boxed{{{answer}}}") == 1


GSM8K = [
    "5 six", "5 or six", "5 or more", "5 not", "5 but no", "5 hundred", "5 thousand", "5 million",
    "5 dozen", "5 half", "5 and a half", "5 minus one", "5 times six", "≠5", "<5", ">5", "≥5", "~5", "!5",
    "±5", "¬5", "[5]", "5x", "5k", "5K", "5M", r"5\pi", "5+x", "5^x", "5*x", "5=x", "5 > x", "5 / six",
    "5½", "5²", "5i", "not 5", "5/6", "5 6", "5,6",
]  # fmt: skip


@pytest.mark.parametrize("answer", GSM8K)
def test_gsm8k_takes_no_number_with_something_beside_it(answer):
    verifier = load_reward("gsm8k")
    for response in (f"#### {answer}", rf"\boxed{{{answer}}}"):
        assert verifier(RewardInput(response=response, ground_truth="5")) == 0, response


@pytest.mark.parametrize(
    "answer",
    [
        "5", "$5", r"\$5", "**5**", "5 apples", "5 dollars/hour", "5%", r"5\%", "5kg", "5 m", "5.", "(5)",
        r"\text{5}",
    ],
)  # fmt: skip
def test_gsm8k_takes_a_number_with_its_unit(answer):
    assert load_reward("gsm8k")(RewardInput(response=f"#### {answer}", ground_truth="5")) == 1


@pytest.mark.parametrize(
    ("answer", "truth"), [("12345678.0", "12345670"), ("1000000.4", "1000000"), ("5.0000001", "5")]
)
def test_an_integer_is_exact(answer, truth):
    assert load_reward("gsm8k")(RewardInput(response=f"#### {answer}", ground_truth=truth)) == 0
    assert load_reward("arithmetic")(RewardInput(response=answer, ground_truth=truth)) == 0
    assert judged(truth, rf"\boxed{{{answer}}}") == 0


@pytest.mark.parametrize(
    "answer", ["≥ 5", ">=5", "!=5", "≠5", r"\ne 5", "not 5", "4 or 5", "4, 5", "4 5", "4; 5", "~5", "6 to 5"]
)
def test_arithmetic_takes_no_number_that_is_denied_or_one_of_several(answer):
    assert load_reward("arithmetic")(RewardInput(response=answer, ground_truth="5")) == 0


CHOICES = {"choices": ["Rome", "Paris", "A cat", "I do"]}


@pytest.mark.parametrize(
    "answer",
    [
        "B A", "B I A", "B I", "B, A", "B/A", "B? A", "B A.", "B A)", "B. A", "B\nA", "(B)(A)", "**B** A",
        "B or A", "B nor A", "B (or A)", "B but maybe A", "B; then A", "B versus A", "B, a",
        "B. Paris A. Rome", "not B", "B is wrong", "B wrong", "B is not right", "B is incorrect", "B B A",
        "BA",
    ],
)  # fmt: skip
def test_a_choice_with_a_second_letter_or_a_denial_chooses_nothing(answer):
    given = RewardInput(response=f"<answer>{answer}</answer>", ground_truth="B", extra_info=CHOICES)
    assert load_reward("choice")(given) == 0


@pytest.mark.parametrize(
    ("answer", "truth"),
    [("B", "B"), ("(B) Paris", "B"), ("B. I think so", "B"), ("C. A cat", "C"), ("A", "A")],
)
def test_a_choice_in_words_is_one(answer, truth):
    given = RewardInput(response=f"<answer>{answer}</answer>", ground_truth=truth, extra_info=CHOICES)
    assert load_reward("choice")(given) == 1


@pytest.mark.parametrize(
    "text", ["NaN", "[Infinity]", "-Infinity", '{"a": NaN}', '{"a":1,"a":5}', '[{"b":1,"b":1}]']
)
def test_what_other_readers_of_json_refuse_or_read_otherwise_is_no_json(text):
    assert not follows(text, "detectable_format:json_format", {})
    verdict = load_reward(JSON_SCHEMA)(RewardInput(response=text), schema=True)
    assert (verdict.value, verdict.components) == (0.0, {"json": 0.0})


@pytest.mark.parametrize("text", ["0x1+2+7", "1+2+7#", "1+2+0b111", "1_0"])
def test_countdown_reads_plain_whole_numbers_only(text):
    truth = {"target": 10, "numbers": [1, 2, 7]}
    assert load_reward(COUNTDOWN)(RewardInput(response=text, ground_truth=truth)).components["proper"] == 0
