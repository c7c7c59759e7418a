"""One episode: the coder writes the body of a function, the tester a test of it. Neither sees the other's."""

from __future__ import annotations

from areal_async import Context, Task

RESPONSE = """```python
def f(a, b):
    return {body}
```
```tests
assert f({inputs}) == {expected}
```"""


async def duel(ctx: Context, task: Task) -> None:
    """`max+4:` asks the coder for `max(a,b)+4`; `max+4?` asks the tester for `3,1=7`."""
    body = await ctx.generate(task.prompt, policy="coder")
    test = await ctx.generate(str(task.prompt).replace(":", "?"), policy="tester")
    inputs, _, expected = test.text.partition("=")
    ctx.builder.text(response=RESPONSE.format(body=body.text, inputs=inputs, expected=expected))
