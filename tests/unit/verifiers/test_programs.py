"""Which part of a response is the program."""

import pytest

from reward_service.verifiers.programs import Block, blocks, program_of

ADD = "print(sum(map(int, input().split())))"
FENCED = f"```python\n{ADD}\n```\n"


def test_blocks_of_a_response():
    text = "a\n```py\none\n```\n~~~\ntwo\n```\n~~~\n````c++\nthree\n```\n````\n```js\nfour"
    assert blocks(text) == [
        Block("py", "one\n"),
        Block("", "two\n```\n"),
        Block("c++", "three\n```\n"),
        Block("js", "four"),
    ]
    assert program_of(text).text == "one\n"
    assert program_of("no block") is None


PROGRAM = ADD + "\n"
BEHIND = {
    "how it is started": "Run it:\n```bash\npython3 add.py\n```\n",
    "what it prints": "It prints\n```text\n7\n```\n",
    "output without a tag": "Output:\n```\n7\n```\n",
    "input and output without a tag": "~~~\n3 4\n~~~\ngives\n~~~\n7\n~~~\n",
    "a tag that nobody knows": "```stdout\nprint(7)\n```",
    "data": '```json\n{"a": 3, "b": 4}\n```',
    "another language": "In C++:\n```cpp\nint main() { return 0; }\n```",
    "a session at a console": "```python\n>>> add(3, 4)\n7\n```",
    "a notebook": "```python\nIn [1]: add(3, 4)\n```",
    "a command with the tag": "```python\n$ python3 add.py\n```",
    "an example with the tag": "```python\nInput: 3 4\nOutput: 7\n```",
    "a value with the tag": "```py\n7\n```",
    "an empty block": "```python\n```\n",
    "a block that is never closed": "```\n3 4",
}


@pytest.mark.parametrize("behind", BEHIND.values(), ids=BEHIND)
def test_what_stands_behind_a_program_is_not_taken_for_it(behind):
    assert program_of(FENCED + behind).text == PROGRAM
    if "```py" not in behind:
        assert program_of(f"```\n{ADD}\n```\n{behind}").text == PROGRAM


@pytest.mark.parametrize(
    "response",
    [
        f"1. Read and add:\n   ```python\n   {ADD}\n   ```\n",
        f"1. ```python\n   {ADD}\n   ```\n",
        f"- Add:\n\n    ~~~python\n    {ADD}\n    ~~~\n",
        f"* ```python\n\t{ADD}\n  ```\n",
        f"> ```python\n> {ADD}\n> ```\n",
        f"> - ```python\n>   {ADD}\n>   ```\n",
        f"10) Add:\n    ```python\n      {ADD}\n    ```\n",
    ],
)
def test_a_block_of_a_list_or_a_quote_is_dedented(response):
    assert program_of(response).text.rstrip() == ADD
    margin = response.splitlines()[-2].partition("print")[0]
    nested = response.replace(ADD, f"if True:\n{margin}    {ADD}")
    assert program_of(nested).text.rstrip() == f"if True:\n    {ADD}"


def test_a_line_of_a_list_that_is_not_indented_leaves_the_others_theirs():
    response = "- Say:\n  ```python\n  print('''a\nb''')\n  if 1:\n    print(2)\n  ```"
    assert program_of(response).text == "print('''a\nb''')\nif 1:\n  print(2)\n"


def test_a_fence_inside_of_a_docstring_does_not_close_the_block():
    program = f'def f():\n    """\n    ```\n    f()\n    ```\n    """\n{ADD}\n'
    assert program_of(f"```python\n{program}```\nDone.").text == program
    assert program_of(f"```python\n{ADD}\n      ```\nDone.").text == PROGRAM


@pytest.mark.parametrize(
    "response", [f"Here: ```python\n{ADD}\n```", f"```python\n{ADD}```", f"So:\n```py\n{ADD}``` \nDone."]
)
def test_a_fence_that_shares_its_line_is_still_one(response):
    assert program_of(response).text.strip() == ADD


@pytest.mark.parametrize(
    ("tag", "language"),
    [
        ("Python", "python"), ("py", "python"), ("python3", "python"), ("python3.11", "python"),
        ("pypy3", "python"), ("main.py", "python"), ("{.python}", ""), ("python title=add.py", "python"),
    ],
)  # fmt: skip
def test_a_tag_names_python_with_a_version_or_as_a_file(tag, language):
    found = program_of(f"```{tag}\nf(1)\n```\n```text\n7\n```")
    assert found == Block(language, "f(1)\n")


@pytest.mark.parametrize(
    ("response", "text"),
    [
        (f"{FENCED}```cpp\nint main() {{}}\n```", PROGRAM),
        (f"```bash\n{ADD}\n```", PROGRAM),
        ("```bash\npython3 add.py\n```", None),
        ("```text\n7\n```", None),
        ("```\nfor (\n```", "for (\n"),
        (f"<think>\n{FENCED}</think>\n```python\nprint(0)\n```", "print(0)\n"),
        (f"<think>\n{FENCED}</think>\nDone.", None),
        (f"<think>\n{FENCED}", None),
    ],
)
def test_the_tag_chooses_the_program(response, text):
    found = program_of(response)
    assert (found and found.text) == text


def test_of_several_programs_the_last_that_defines_what_is_tested_counts():
    first, second = "def add(a, b):\n    return 0\n", "async def add(a, b):\n    return a + b\n"
    usage = "print(add(1, 2))\n"
    response = "".join(f"```python\n{one}```\n" for one in (first, second, usage))
    assert program_of(response).text == usage
    assert program_of(response, defines=["add"]).text == second
    assert program_of(response, defines=["other"]).text == usage
    assert (
        program_of("```python\nadd = max\n```\n```python\nadd(1)\n```", defines=["add"]).text == "add = max\n"
    )
