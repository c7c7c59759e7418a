"""What a step computes, as a job file says it."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from areal_async.config.base import Section
from areal_async.storage.urls import FETCHED

ServerUrl = Annotated[str, Field(pattern=r"^https?://[^/@\s]+(/[^@\s]*)?$")]


class KlSection(Section):
    """The penalty for moving away from the reference policy. With d = logp − ref of a token: `k1` is d, `k2`
    is d²/2, `k3` is e^−d − 1 + d."""

    coefficient: float = Field(default=0.0, ge=0)
    """What it is multiplied by; 0 means none, and no reference is loaded."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """How the divergence is estimated from the sampled tokens."""
    place: Literal["loss", "reward"] = "loss"
    """Where it goes: into the `loss` of each token, or off its `reward`."""
    straight_through: bool = False
    """In the loss, the gradient of `k2`, which is that of the divergence itself, whichever estimator gives
    the value."""
    target: float | None = Field(default=None, gt=0)
    """Divergence per token, in nats, at which the coefficient is held: it rises while the measured one is
    above, and falls while it is below. None leaves it as it is."""
    horizon_steps: float = Field(default=10.0, ge=1)
    """With a `target`, the coefficient changes in each step by the share measured / target − 1, held within
    ±0.2 and divided by this."""


class ReferenceSection(Section):
    """The policy that `objective.kl` measures the distance from."""

    model: Annotated[Path | None, *FETCHED] = None
    """Hugging Face directory of it; none means the model that the job begins with."""
    every_steps: int = Field(default=0, ge=0)
    """Steps between two moves of the reference towards the policy; 0 keeps it as it is."""
    share: float = Field(default=1.0, gt=0, le=1)
    """How far it moves: 1 makes it the policy of that step, less moves it by that share of the way."""


class TeacherSection(Section):
    """The model whose distribution the advantage `distill` teaches: a folder, or servers. It has the policy's
    tokenizer."""

    model: Annotated[Path | None, *FETCHED] = None
    """Hugging Face directory of a teacher that the trainer holds itself, frozen."""
    urls: tuple[ServerUrl, ...] = ()
    """Base URLs of servers that score tokens, such as `http://host:30000`; each step's requests are dealt to
    them in turn."""
    api: Literal["sglang", "vllm"] = "sglang"
    """What the servers are: SGLang (`/generate`) or vLLM (`/v1/completions` with `prompt_logprobs`)."""
    name: str = ""
    """Name of the model as a vLLM server knows it."""
    key_env: str = ""
    """Environment variable that holds the servers' key, where they ask for one."""
    timeout_s: float = Field(default=300.0, gt=0)
    """Seconds that the requests of one step may take, repeated ones included."""
    max_concurrent: int = Field(default=32, ge=1, le=65_536)
    """Most requests of one training process at once."""


class ObjectiveSection(Section):
    """advantage × loss × correction × normaliser, with a KL penalty and an entropy bonus (see
    docs/objectives.md). Each part is a built-in one, an installed one, or `path.py:name` of your own."""

    preset: str | None = Field(default=None, min_length=1)
    """An algorithm by the name of its paper, such as `dapo`: what it consists of is filled in where the job
    file says nothing else. `areal-async objectives` lists them."""
    advantage: str = Field(default="grpo", min_length=1)
    """`grpo`: the reward less its group's mean, over its group's standard deviation; docs/objectives.md lists
    the others; or one of your own."""
    advantage_args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the advantage."""
    group_by: Literal["task", "task_agent", "task_agent_turn", "task_turn"] = "task"
    """What an advantage compares: whole episodes of a `task`; what each agent did in them, with the agent's
    own reward (`task_agent`); what an agent earned from one turn on, with the same of that turn in the other
    episodes (`task_agent_turn`); or what all agents together earned from one turn on (`task_turn`)."""
    turn_discount: float = Field(default=1.0, ge=0, le=1)
    """With `task_agent_turn` and `task_turn`, what a reward one turn later counts."""
    loss: str = Field(default="ppo", min_length=1)
    """`ppo`: the clipped ratio loss; docs/objectives.md lists the others; or one of your own."""
    loss_args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the loss: of `ppo`, `clip_low` and `clip_high` (0.2), and `dual_clip`."""
    correction: str = Field(default="decoupled", min_length=1)
    """What makes up for stale samples: `decoupled` weighs each token by exp(prox - behaviour); `none`;
    docs/objectives.md lists the others; or one of your own."""
    correction_args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the correction: of `decoupled`, the `cap` (5) at which it truncates its weight."""
    prox: Literal["auto", "recompute", "reuse", "loglinear"] = "auto"
    """Where proximal log-probs, those of the weights that the step starts from, come from: a forward pass of
    their own (`recompute`); the update's own forward pass (`reuse`), which is the same with one minibatch per
    step; `loglinear`, between behaviour and current log-probs by the token's staleness, without a pass; or
    `auto`: `recompute` where a pass is needed, `loglinear` with one minibatch of stale samples, the loss
    `ppo` and a correction, else `reuse`. See docs/objectives.md#which-objective-to-choose."""
    allow_uncorrected: bool = False
    """Allow `correction: none` with stale samples, for an experiment."""
    kl: KlSection = KlSection()
    entropy: float = Field(default=0.0, ge=0)
    """The policy's entropy is added to what is maximised, times this: 0 means no bonus."""
    normaliser: str = Field(default="token", min_length=1)
    """`token`: mean over all tokens of the update; `sequence`: mean over rows of the mean over each one's
    tokens; `rollout`: likewise over episodes; `constant`: sum over tokens by a fixed length, mean over
    episodes; or one of your own."""
    normaliser_args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the normaliser."""
    on_non_finite: Literal["stop", "skip"] = "stop"
    """What is done about a minibatch whose loss or gradient is not finite: `stop` ends the job, `skip` goes
    on without that update. The batch is kept under `batches/` for `areal-async buffer replay` either way."""
    on_nothing_to_learn: Literal["skip", "stop"] = "skip"
    """What is done about a step in which every advantage is 0 and nothing else gives a gradient: `skip` goes
    on without an update, `stop` ends the job."""
    ess_floor: float = Field(default=0.2, ge=0, le=1)
    """Effective share of the samples, (Σw)² / (NΣw²), below which they say little about the policy that is
    trained: a job that stays below it for `ess_patience` steps is told what to change."""
    ess_patience: int = Field(default=10, ge=1)
    """Steps in a row below `ess_floor` until the job is told."""
