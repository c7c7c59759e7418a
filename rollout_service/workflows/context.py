"""The context of a workflow, which generates answers and records the input and output of the engine.

Promise: every call of `generate` adds exactly the ids that the engine was given, and the ids, log-probs,
versions and epochs that it returned. A path of the episode is never tokenised again. Text after a reply is
tokenised by itself and appended (see `turns.py` for chats).
"""

from __future__ import annotations

import asyncio
import hashlib
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import numpy as np

from areal_async.base.errors import ArealError
from areal_async.base.records import Task
from areal_async.models.answers import opens_thought, spoken
from areal_async.models.prompts import Tokenizer, pieces
from areal_async.trajectory import Call, EpisodeBuilder, PromptedGroup, Sampling, SegmentKind
from rollout_service import metrics
from rollout_service.engines.base import (
    DeadlinePassed,
    EngineError,
    GenerateRequest,
    GenerateResult,
    RequestImage,
)
from rollout_service.workflows.images import NO_CHAT, Content, EpisodeImages
from rollout_service.workflows.tools import Tool, ToolAnswer, ToolReply, WorkflowResources, run_tool
from rollout_service.workflows.turns import (
    Chat,
    Ids,
    NewSegment,
    Prompt,
    Rendered,
    Renderer,
    Reply,
    Rewritten,
    TemplateRewrites,
    TurnError,
    continuation,
    is_chat,
)

if TYPE_CHECKING:
    from rollout_service.replicas import ReplicaSet


REWARD = "reward"
"""Name of the recorded reward that `reward.name: environment` uses as the episode's score."""

_SEED_PARTS = struct.Struct("<4Q")
_LAST_TOKENS = 64  # Last tokens of a path, enough to contain a tag at its end


def call_seed(group_seed: int, sample: int, attempt: int, call: int) -> int:
    """Return a 63-bit seed for one call of one episode. It depends only on the arguments."""
    digest = hashlib.blake2b(_SEED_PARTS.pack(group_seed, sample, attempt, call), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class EpisodeAborted(ArealError):
    """The engine aborted a request before its answer was complete, so the episode is invalid."""


@dataclass(frozen=True)
class PolicyEngine:
    """The engine of one policy, with the job's parameters for it."""

    engine: ReplicaSet
    render: Renderer
    sampling: Sampling
    max_model_len: int | None = None
    """Largest number of tokens of a path. None: the limit in the workflow's resources applies."""


class AgentAccess(Protocol):
    """The part of a worker's gateway (`rollout_service.gateway.Gateway`) that a context uses."""

    def session(self, episode: Context) -> AbstractAsyncContextManager[Any]: ...


@dataclass(eq=False)
class Context:
    """One episode under construction. Use `builder` for anything without a method here (metadata, flags
    …)."""

    engines: Mapping[str, PolicyEngine]
    """Engine of each policy, in the order of the builder's policy numbers."""
    builder: EpisodeBuilder
    _: KW_ONLY
    episode_id: str
    seed: int
    """Seed of the group."""
    sample: int = 0
    attempt: int = 0
    lease_id: str = ""
    """Part of each request's id. With it, ids stay unique if an episode is restarted under a new lease while
    the engine still has requests of the lost lease."""
    priority: int = 0
    deadline_s: float | None = None
    """Deadline of the episode's requests, as in `GenerateRequest`."""
    agents: AgentAccess | None = None
    greedy: bool = False
    """Whether all answers are sampled greedily; none of them is trained."""
    routes: bool = False
    """Request the routes of all tokens from the engine, and record them."""
    new_media: dict[str, bytes] = field(default_factory=dict)
    """Media in the episode that its task does not have, such as images of tools, by digest."""

    def __post_init__(self) -> None:
        self._asked_s: dict[str, float] = {}  # Time when each request in flight was sent to its engine
        self._cut_s = 0.0
        self.trouble: Exception | None = None
        """Last error of an engine or of the gateway, for which the episode's answers are not at fault."""
        self._calls = self._tool_calls = self._tool_errors = 0
        self._anchor: str | bytes | None = None
        self._paths: dict[int, Ids | tuple[int, bytes]] = {}
        """Ids of the path down to each segment. Until the ids are needed, the entry has only the parent and
        the segment's own ids."""
        self._chats: dict[int, Chat] = {}  # The conversation up to each segment, if the path is a chat
        self._policy: dict[int, str] = {}  # The policy of each segment's tokens
        self._media: dict[int, tuple[RequestImage, ...]] = {}  # Images of the path down to each segment
        self._images = EpisodeImages(self.new_media)

    @cached_property
    def resources(self) -> WorkflowResources:
        """Tools and limits shared by the worker's episodes."""
        return WorkflowResources()

    @property
    def policies(self) -> tuple[str, ...]:
        """Names of the job's policies. The first is the default."""
        return self.builder.policies

    @property
    def sampling(self) -> Sampling:
        """Default sampling parameters of the first policy."""
        return self.engines[self.policies[0]].sampling

    @sampling.setter
    def sampling(self, sampling: Sampling) -> None:
        first = self.policies[0]
        self.engines = {**self.engines, first: replace(self.engines[first], sampling=sampling)}

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the first policy."""
        return self.engines[self.policies[0]].render.tokenizer

    def agent(self, name: str, policy: str | None = None) -> int:
        """Return the number of the agent with this name, for the argument `agent=`. A new agent samples with
        `policy`, by default the first. In a job with several policies, each policy has an agent with the
        policy's name."""
        return self.builder.agent(name, None if policy is None else self._number(policy))

    def _number(self, policy: str) -> int:
        """Return the number of a policy. Raises ValueError if the job has no policy of that name."""
        if policy not in self.policies:
            raise ValueError(f"there is no policy {policy!r}; the job has {', '.join(self.policies)}")
        return self.policies.index(policy)

    def speaker(self, agent: int | None, policy: str | None) -> tuple[int, str]:
        """Return the number of an agent and its policy. Either argument may be None."""
        if agent is None:
            agent = 0 if policy is None else self.builder.agent_of(self._number(policy))
        spoken_for = self.policies[self.builder.policy_of(agent)]
        if policy is not None and spoken_for != policy:
            raise ValueError(f"agent {agent} speaks for {spoken_for}, not for {policy}")
        return agent, spoken_for

    # --- generation ------------------------------------------------------------------------------------

    def alike(self, prompt: Prompt, tools: Sequence[Mapping[str, Any]] = ()) -> AlikeSamples:
        """Begin the episodes of a group whose samples each make one call, `generate(prompt, tools=tools)`."""
        agent, policy = self.speaker(None, None)
        segment = self.observe(SegmentKind.PROMPT, prompt, parent=None, tools=tools, policy=policy)
        self.builder.text(prompt=self._prompt_text(None if tools else prompt, segment))
        voice = self.engines[policy].sampling
        number = self.builder.policy_of(agent)
        return AlikeSamples(self, self.builder.alike(), voice, self._path(segment), number)

    async def generate(
        self,
        prompt: Prompt | None = None,
        *,
        parent: int | None = None,
        policy: str | None = None,
        agent: int | None = None,
        turn: int = 0,
        tools: Sequence[Mapping[str, Any]] = (),
        rewritten: Rewritten = "error",
        train: bool = True,
        **sampling: Any,
    ) -> Reply:
        """Append `prompt` to the path of the segment `parent`, or begin a path without it, then sample.
        `policy` is by default the agent's, or else the first. Policies on a path share a tokenizer.

        `prompt` is text, chat messages or token ids. None samples directly after `parent`. Messages after a
        reply become the text that the chat template appends. `rewritten` is the action if the template would
        change earlier text: `error` raises `TemplateRewrites`, and `root` begins a new path with the
        conversation rendered again. `tools` are schemas for the template of a new path. Further keywords
        replace the job's sampling parameters (`seed=7`, `max_new_tokens=16`, …).

        With `train=False`, the answer is context without gradient. This is required for answers sampled
        greedily or with top-p or top-k. The first call sets the episode's prompt text, and every call sets
        its response text; `builder.text` changes both. Raises `RequestError` if the engine refuses."""
        root = parent is None
        agent, policy = self.speaker(agent, policy)
        voice = self.engines[policy]
        if prompt is not None:
            kind = SegmentKind.PROMPT if root else SegmentKind.ENVIRONMENT
            where: Any = {"parent": parent, "agent": agent, "turn": turn, "policy": policy}
            parent = await self.observed(kind, prompt, tools=tools, rewritten=rewritten, **where)
        elif parent is None:
            raise ValueError("generate() needs a prompt, or a parent to go on from")
        if not self._calls:
            self.builder.text(prompt=self._prompt_text(prompt if root and not tools else None, parent))
        if sampling.get("seed") is None:
            sampling["seed"] = call_seed(self.seed, self.sample, self.attempt, self._calls)
        anchor, self._anchor = self._anchor, None
        if self.engines[self._policy[parent]].render is not voice.render:
            raise ValueError(
                f"{policy} cannot go on with a path of {self._policy[parent]}, whose tokenizer is another; "
                "begin a path with the text"
            )
        asked = self.drawn(msgspec.structs.replace(voice.sampling, **sampling))
        request = self.request(str(self._calls), self._path(parent), asked, policy, parent)
        self._calls += 1
        result = await self.ask(policy, request)
        if result.finish_reason == "abort":
            raise EpisodeAborted(f"a request of episode {self.episode_id} was aborted")
        segment = self.answered(request, result, parent=parent, agent=agent, turn=turn, train=train)
        if chat := self._chats.get(parent):
            chat = chat.said(self.decoded(result.token_ids, policy), self._end(result, policy))
        self._place(segment, (parent, result.token_ids.tobytes()), policy, chat)
        if anchor is not None:
            self.builder.anchor(segment, anchor)
        self.builder.text(response=result.text)
        return Reply(
            segment, result.token_ids, result.logprobs, result.versions, result.finish_reason, result.text
        )

    async def ask(self, policy: str, request: GenerateRequest) -> GenerateResult:
        """Send a request to the engine of a policy. All requests go through this method, because it records
        errors for which the episode's answers are not at fault."""
        began_s = self._asked_s[request.request_id] = time.monotonic()
        engine = self.engines[policy].engine
        try:
            result = await engine.generate(request)
        except (asyncio.CancelledError, DeadlinePassed):
            self._cut_s = max(self._cut_s, time.monotonic() - began_s)
            raise
        except EngineError as error:
            self.trouble = error
            raise
        finally:
            del self._asked_s[request.request_id]
        if result.finish_reason == "abort":
            self.trouble = EpisodeAborted(f"a request of episode {self.episode_id} was aborted")
        return result

    @property
    def waited_s(self) -> float:
        """Longest wait for an answer that has not arrived, in seconds."""
        now_s = time.monotonic()
        return max([self._cut_s, *(now_s - asked_s for asked_s in self._asked_s.values())])

    def drawn(self, sampling: Sampling) -> Sampling:
        """Return the sampling parameters for a call that requests `sampling`. They are greedy if the episode
        is greedy."""
        greedily = {"temperature": 0.0, "top_p": 1.0, "top_k": 0}
        return msgspec.structs.replace(sampling, **greedily) if self.greedy else sampling

    def answered(
        self,
        request: GenerateRequest,
        result: GenerateResult,
        *,
        parent: int,
        agent: int,
        turn: int,
        train: bool = True,
    ) -> int:
        """Add an answer and its routes after `parent`. Return its segment."""
        trained = train and not self.greedy
        segment = self.builder.sampled(
            result.token_ids,
            result.logprobs,
            result.versions,
            parent=parent,
            call=Call(
                sampling=request.sampling, finish_reason=result.finish_reason, logprobs_of=result.logprobs_of
            ),
            epoch=result.epochs,
            agent=agent,
            turn=turn,
            mask=None if trained else np.zeros(len(result.token_ids), np.uint8),
        )
        if result.routes is not None and request.routes_from is not None:
            self.builder.routes(segment, result.routes, request.routes_from)
        return segment

    def gateway(self) -> AbstractAsyncContextManager[Any]:
        """Give agents access over HTTP inside `async with ctx.gateway() as session:`. The answers sampled for
        them are recorded in this episode. See docs/gateway.md."""
        if self.agents is None:
            raise ArealError("this context was made without a gateway")
        return self.agents.session(self)

    def request(
        self, name: str, ids: Ids, sampling: Sampling, policy: str, parent: int | None
    ) -> GenerateRequest:
        """Return a request to the engine of a policy for this episode. `name` distinguishes it from the
        episode's other requests. `ids` begin with the path of the segment `parent`."""
        return GenerateRequest(
            f"{self.episode_id}/{self.lease_id}/{name}",
            ids,
            sampling,
            session=self.episode_id,
            began=self.builder.began(self._number(policy)),
            routes_from=(0 if parent is None else self.builder.routed(parent)) if self.routes else None,
            media=() if parent is None else self._media.get(parent, ()),
            priority=self.priority,
            deadline_s=self.deadline_s,
        )

    # --- segments that no policy samples --------

    def observe(self, kind: SegmentKind, content: Prompt, *, parent: int | None, **how: Any) -> int:
        """Add a segment that no policy sampled, such as an answer of a tool or an environment. Return its
        index. `content` and the keywords `agent`, `turn`, `tools`, `rewritten` and `policy` (by default the
        agent's) are as in `generate`. Images are decoded at once; `observed` decodes them in a thread."""
        new = self._segment(kind, content, parent, **how)
        return self._add(new, self.engines[new.policy].render.shown(new))

    async def observed(self, kind: SegmentKind, content: Prompt, *, parent: int | None, **how: Any) -> int:
        """Add a segment as `observe` does, without blocking the event loop while images are decoded."""
        new = self._segment(kind, content, parent, **how)
        return self._add(new, await self.engines[new.policy].render.shown_aside(new))

    def _segment(
        self,
        kind: SegmentKind,
        content: Prompt,
        parent: int | None,
        agent: int = 0,
        turn: int = 0,
        tools: Sequence[Mapping[str, Any]] = (),
        rewritten: Rewritten = "error",
        policy: str | None = None,
    ) -> NewSegment:
        if parent is None:
            _, policy = self.speaker(agent, policy)
            chat = Chat(tuple(content), tuple(tools)) if is_chat(content) else None
            return self._root(NewSegment(kind, None, agent, turn, policy, chat), content)
        policy = self._policy[parent]
        new = NewSegment(kind, parent, agent, turn, policy)
        render = self.engines[policy].render
        if isinstance(content, str):
            return new._replace(ids=render.following(content))
        if not is_chat(content):
            return new._replace(ids=np.asarray(content, np.int32))
        chat = self._chats.get(parent)
        if chat is None:
            raise TurnError("messages can only go on with a path that began with messages")
        after, changed = continuation(render.tokenizer, chat, content)
        new = new._replace(chat=chat.then(content), text=after, images=self._images.of(content))
        if changed and rewritten == "error":
            raise TemplateRewrites(
                "the chat template renders earlier turns otherwise once the conversation goes on (it "
                "drops or changes what the model saw or said). Set `rewritten` to `root` to begin a new "
                "path with the conversation rendered anew, or use a template that keeps its past."
            )
        if changed:
            metrics.REWRITES.inc()
            return self._root(new._replace(kind=SegmentKind.PROMPT, parent=None), chat.then(content).messages)
        return new if new.images else new._replace(ids=render.following(after))

    async def call_tool(
        self, name: str | Tool, arguments: str | Mapping[str, Any], *, timeout_s: float | None = None
    ) -> ToolAnswer:
        """Call a tool and count the call, without adding a segment to the episode. If the tool fails, the
        answer has the error."""
        answer = await run_tool(self.resources, name, arguments, timeout_s, self._images.content)
        self._tool_calls += 1
        self._tool_errors += bool(answer.error)
        self.builder.meta(tool_calls=self._tool_calls, tool_errors=self._tool_errors)
        return answer

    async def tool(
        self,
        name: str | Tool,
        arguments: str | Mapping[str, Any],
        *,
        parent: int,
        agent: int = 0,
        turn: int = 0,
        show: Callable[[str], Prompt] | None = None,
        timeout_s: float | None = None,
        rewritten: Rewritten = "error",
    ) -> ToolReply:
        """Call a tool, and add its answer after `parent` as a TOOL segment. The tool is one of the job's
        `tools` or a function marked `@tool`. A text as `arguments` is the tool's only argument; a mapping has
        the arguments by name. An error in the tool becomes the answer `error: …`. `show` converts an answer
        without images to a prompt. By default, this is a message with the role `tool` if the path is a chat,
        and otherwise the text itself."""
        answer = await self.call_tool(name, arguments, timeout_s=timeout_s)
        text = f"error: {answer.error}" if answer.error else answer.text
        called = name.name if isinstance(name, Tool) else name
        content: Prompt = text
        if show is not None and not answer.parts:
            content = show(text)
        elif parent in self._chats:
            content = [{"role": "tool", "name": called, "content": [*answer.parts] or text}]
        elif answer.parts:
            raise TurnError(NO_CHAT)
        where: Any = {"parent": parent, "agent": agent, "turn": turn}
        segment = await self.observed(SegmentKind.TOOL, content, rewritten=rewritten, **where)
        return ToolReply(segment, text, answer.error)

    # --- rewards and marks -----------------------------------------------------------------------------

    def reward(self, value: float, *, name: str = REWARD, segment: int | None = None) -> None:
        """Record a reward of a segment, or a reward of the whole episode under a name. The built-in reward
        `environment` uses the recorded reward named `reward` as the episode's score. If there is none, it
        uses the sum over segments. Rewards with other names are only reported. Raises ValueError if the value
        is not finite."""
        number = float(value)
        if not np.isfinite(number):
            raise ValueError(f"a reward is a finite number, not {value}")
        if segment is None:
            self.builder.episode_reward(name, number)
        else:
            self.builder.reward(segment, number)

    def anchor(self, key: str | bytes, segment: int | None = None) -> None:
        """Set the key of the state before `segment`, by default before the next sampled segment. Equal keys
        in the episodes of a group mean equal states."""
        if segment is None:
            self._anchor = key
        else:
            self.builder.anchor(segment, key)

    # --- queries --------

    def room(self, segment: int) -> int:
        """Return how many tokens may follow `segment` until the path has its maximum length."""
        limit = self.engines[self._policy[segment]].max_model_len or self.resources.max_model_len
        return max(0, limit - len(self._path(segment))) if limit is not None else 2**31 - 1

    def is_chat(self, segment: int) -> bool:
        """Return whether the path of `segment` began with messages."""
        return segment in self._chats

    def as_user(self, text: Content, segment: int) -> Prompt:
        """Return `text` in the form for continuing `segment`: as a message of the user if the path is a
        chat. It may be a list of parts with images (`content`) if the path is a chat."""
        if self.is_chat(segment):
            return [{"role": "user", "content": text}]
        if not isinstance(text, str):
            raise TurnError(NO_CHAT)
        return text

    def show(self, segment: int, media: Sequence[RequestImage]) -> None:
        """Record that a segment has images. Their tokens are counted from the start of the segment."""
        for image in media:
            facts = self._images.facts(image.digest, image.data)
            where = {"start": image.first, "n_units": image.count}
            self.builder.media(segment, image.digest, facts.media_type, facts.size_bytes, **where)

    def seeing(self, task: Task) -> Task:
        """Take over the images of a task. Return the task with their digests in its prompt."""
        return self._images.seeing(task)

    def content(self, value: Any) -> Content:
        """Return a text, an image (bytes, or of Pillow) or a list of parts as the content of a message. Its
        images become part of the episode. Raises `ImageError`."""
        return self._images.content(value)

    def decoded(self, ids: Ids, policy: str | None = None) -> str:
        """Return the text of a policy's answer without its end token. The default is the first policy. Stop
        strings and other special tokens stay in the text."""
        return self.engines[policy or self.policies[0]].render.answers.text(ids.tolist())

    def opens_thought(self, segment: int) -> bool:
        """Return whether the path down to `segment` ends with a tag that opens a thought. Prompts of some
        chat templates end with such a tag, so that an answer begins inside the thought."""
        last = self._path(segment)[-_LAST_TOKENS:].tolist()
        return opens_thought(self.engines[self._policy[segment]].render.answers.text(last, whole=True))

    def spoken(self, text: str, segment: int) -> str:
        """Return an answer after `segment` without its thoughts."""
        return spoken(text, opened=self.opens_thought(segment))

    def _end(self, result: GenerateResult, policy: str) -> str:
        """Return the text of an answer's end token, or "" without one."""
        render, last = self.engines[policy].render, result.token_ids[-1:].tolist()
        return render.answers.text(last, whole=True) if render.ends.issuperset(last) else ""

    def _root(self, new: NewSegment, content: Prompt) -> NewSegment:
        """Return the segment `new` with the text or the ids of `content`, which begins a path."""
        render, chat = self.engines[new.policy].render, new.chat
        images = self._images.of(chat.messages) if chat is not None else []
        if chat is not None and chat.tools:
            text = chat.render(render.tokenizer)
            return new._replace(text=text, images=images, ids=None if images else render.following(text))
        shown = render(content)
        return new._replace(text=shown.text, images=images, ids=None if images else shown.ids)

    def _add(self, new: NewSegment, shown: Rendered) -> int:
        """Add a segment, and return its index."""
        path = shown.ids if new.parent is None else (new.parent, shown.ids.tobytes())
        segment = self.builder.observed(new.kind, shown.ids, new.parent, new.agent, new.turn)
        return self._place(segment, path, new.policy, new.chat, shown.media)

    def _place(
        self,
        segment: int,
        path: Ids | tuple[int, bytes],
        policy: str,
        chat: Chat | None,
        media: tuple[RequestImage, ...] = (),
    ) -> int:
        """Record the path of a new segment, and its images. Return the segment."""
        self._paths[segment], self._policy[segment] = path, policy
        above = self._media.get(path[0], ()) if isinstance(path, tuple) else ()
        begin = len(self._path(path[0])) if media and isinstance(path, tuple) else 0
        above += tuple(image._replace(first=begin + image.first) for image in media)
        self.show(segment, media)
        if above:
            self._media[segment] = above
        if chat is not None:
            self._chats[segment] = chat
        return segment

    def _prompt_text(self, prompt: Prompt | None, segment: int) -> str:
        """Return the first text that the model reads. The rendering of a chat `prompt` is still cached."""
        policy = self._policy[segment]
        render, path = self.engines[policy].render, self._path(segment).tolist()
        known = "".join(pieces(render.tokenizer, render(prompt).text)) if prompt is not None else ""
        for image in reversed(self._media.get(segment, ())):
            del path[image.first + 1 : image.first + image.count]
        return known or render.answers.text(path, whole=True)

    def _path(self, segment: int) -> Ids:
        """Return the ids of the path down to a segment, including the segment."""
        at, pieces = segment, []
        while isinstance(path := self._paths[at], tuple):
            at, ids = path
            pieces.append(np.frombuffer(ids, np.int32))
        if pieces:
            path = self._paths[segment] = np.concatenate((path, *reversed(pieces)))
            path.setflags(write=False)
        return path


@dataclass(frozen=True)
class AlikeSamples:
    """A group whose samples each make one call with the same prompt. The prompt is rendered once. Requests
    and episodes equal those of `Context.generate`."""

    first: Context
    """Context of one of the samples, with the prompt."""
    group: PromptedGroup
    sampling: Sampling
    ids: Ids
    number: int
    """Number of the policy."""

    def request(self, sample: int) -> GenerateRequest:
        """Return the request of a sample."""
        ctx = self.first
        seed = call_seed(ctx.seed, sample, ctx.attempt, 0)
        sampling = ctx.drawn(msgspec.structs.replace(self.sampling, seed=seed))
        episode_id = f"{self.group.group_id}.{sample}"
        return GenerateRequest(
            f"{episode_id}/{ctx.lease_id}/0",
            self.ids,
            sampling,
            session=episode_id,
            priority=ctx.priority,
            deadline_s=ctx.deadline_s,
        )

    def blob(self, sample: int, request: GenerateRequest, result: GenerateResult) -> bytes:
        """Return the packed episode of a sample. Raises `EpisodeAborted` or `TrajectoryError`."""
        if result.finish_reason == "abort":
            raise EpisodeAborted(f"a request of episode {request.session} was aborted")
        call = Call(1, self.number, request.sampling, result.finish_reason, result.logprobs_of)
        columns = result.token_ids, result.logprobs, result.versions, result.epochs
        return self.group.blob(sample, call, result.text, *columns)
