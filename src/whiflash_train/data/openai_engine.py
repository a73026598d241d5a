"""Answers from servers that speak the OpenAI protocol: vLLM, SGLang and others."""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import logging
import os
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Container, Generator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import openai

from whiflash_infer.chat import Chat
from whiflash_infer.errors import UserError
from whiflash_infer.target import Target
from whiflash_train.checks import checked
from whiflash_train.data.engines import Answer, Job, Sampling, seed_of
from whiflash_train.data.openai_wire import (
    MalformedError,
    first_choice,
    read_answer,
    to_wire,
    token_ids,
)
from whiflash_train.data.processes import Processes

_CONNECT_S, _LONGEST_PAUSE_S, _LONGEST_RETRY_AFTER_S = 10.0, 60.0, 600.0
_HOPELESS = {401, 403, 404}  # no other request would fare better
_PASSING = {408, 409, 425, 429}  # and everything from 500 on
_MOST_TOLD = 300  # characters of a server's own message


@checked
@dataclass(frozen=True, kw_only=True)
class OpenAIEngine:
    """Which servers to ask, and how.

    urls: base URLs, such as http://localhost:8000/v1.
    model: None is the one model that the servers list.
    concurrency: requests in flight, per URL.
    max_retries: further tries of a request that failed by no fault of its own.
    backoff_s: seconds before the first of them; doubles with each, unless the server says how long.
    timeout_s: seconds without a byte. An answer comes in one piece, so it must be written in that.
    api_key_env: the environment variable that holds the key; None sends no key.
    check_prompt: compare the prompt's tokens with ours, where the server tells them.
    extra_body: more keys of the request, over our own; a None takes the key out.
    """

    urls: list[str]
    model: str | None
    concurrency: int
    max_retries: int
    backoff_s: float
    timeout_s: float
    api_key_env: str | None
    check_prompt: bool
    extra_body: dict[str, Any]

    def __post_init__(self) -> None:
        if not self.urls or len(set(self.urls)) < len(self.urls):
            raise UserError("engine.urls: at least one URL is needed, and none of them twice")
        for url in self.urls:
            if not url.startswith(("http://", "https://")):
                raise UserError(f"engine.urls: {url} is no http(s):// address")
        for name, least in {"concurrency": 1, "max_retries": 0, "backoff_s": 0}.items():
            if getattr(self, name) < least:
                raise UserError(f"engine.{name}: must be at least {least}")
        if self.timeout_s <= 0:
            raise UserError("engine.timeout_s: must be more than 0")

    def connect(self, chat: Chat, load_target: Callable[[], Target]) -> ServedEngine:
        """The engine itself. No server is asked yet, and the target's weights are not needed.

        Raises: UserError when the environment lacks the key.
        """
        key = None if self.api_key_env is None else os.environ.get(self.api_key_env)
        if self.api_key_env is not None and not key:
            raise UserError(
                f"engine.api_key_env: there is no {self.api_key_env} in the environment"
            )
        for name in ("httpx", "httpx2"):  # a line for every request
            logging.getLogger(name).setLevel(logging.WARNING)
        return ServedEngine(self, chat.options.variables(), key)


class ServedEngine:
    """Asks the servers; an `Engine`.

    retries: how many tries were repeated, by the name of what went wrong.
    """

    def __init__(
        self, settings: OpenAIEngine, template_variables: dict[str, Any], key: str | None
    ) -> None:
        self.retries: Counter[str] = Counter()
        self._settings = settings
        self._key = key
        extra: dict[str, Any] = {"return_token_ids": True}
        if template_variables:
            extra["chat_template_kwargs"] = template_variables
        extra |= settings.extra_body
        self._extra_body = {k: v for k, v in extra.items() if v is not None}

    @functools.cached_property
    def model(self) -> str:
        """The model's name at the servers, every one of which is asked for it.

        Raises: UserError when one cannot be reached, or does not have the model.
        """
        listed = {url: self._list_models(url) for url in self._settings.urls}
        first, names = next(iter(listed.items()))
        model = self._settings.model
        if model is None:
            if len(names) != 1:
                raise UserError(
                    f"engine.model: say which of the {len(names)} models of {first}: "
                    f"{', '.join(names)}"
                )
            model = names[0]
        for url, names in listed.items():
            if model not in names:
                raise UserError(f"engine.model: {url} has no {model}. It has {', '.join(names)}")
        return model

    def target_identity(self) -> None:
        """Another program writes the answers."""

    def facts(self) -> dict[str, Any]:
        """Asks the servers when the settings leave the model to them.

        Raises: UserError as `model` does.
        """
        return {
            "kind": "openai",
            "model": self._settings.model or self.model,
            "request": self._extra_body,
        }

    def answers(
        self, jobs: list[Job], done: Container[str], sampling: Sampling
    ) -> Generator[list[Answer], None, None]:
        """See `Engine`. Each of several processes asks its share of the jobs.

        The servers go on while the answers of a batch are dealt with, but get no new requests.
        Raises: UserError when a server lacks the model, refuses us, renders another prompt, or when
        none can be reached any more.
        """
        here = Processes.here()
        waiting = [job for job in jobs[here.index :: here.count] if job.id not in done]
        if not waiting:
            return
        _ = self.model  # every server is there, before the first request
        arrived: asyncio.Queue[Answer | Exception] = asyncio.Queue()
        left = len(waiting)
        with asyncio.Runner() as runner:  # its end cancels whatever is under way
            asking = runner.get_loop().create_task(self._ask_all(waiting, sampling, arrived))
            while left:
                items = runner.run(_next_items(arrived))
                answers = [item for item in items if isinstance(item, Answer)]
                left -= len(answers)
                if answers:
                    yield answers
                for item in items:
                    if isinstance(item, Exception):
                        raise item
            runner.run(_end_of(asking))

    def _client_settings(self, url: str) -> dict[str, Any]:
        timeout = self._settings.timeout_s
        return {
            "base_url": url,
            "api_key": self._key or "EMPTY",  # the client insists on one
            "timeout": openai.Timeout(timeout, connect=min(timeout, _CONNECT_S)),
        }

    def _list_models(self, url: str) -> list[str]:
        few = min(self._settings.max_retries, 2)
        try:
            with openai.OpenAI(max_retries=few, **self._client_settings(url)) as client:
                raw = client.models.with_raw_response.list()
            body = json.loads(raw.http_response.content)
            return [str(model["id"]) for model in body["data"]]
        except openai.APIError as error:
            raise UserError(
                f"engine.urls: {url} does not tell its models: {self._told(error)}. "
                "Is the server up, and is this its base URL (most end in /v1)?"
            ) from None
        except (ValueError, LookupError, TypeError):
            raise UserError(f"engine.urls: {url}/models is not that of an OpenAI server") from None

    async def _ask_all(
        self, jobs: list[Job], sampling: Sampling, arrived: asyncio.Queue[Answer | Exception]
    ) -> None:
        """Puts an answer to every job, or the exception that ends it all."""
        settings = self._settings
        try:
            async with AsyncExitStack() as stack:
                servers = []
                for url in settings.urls:
                    client = openai.AsyncOpenAI(max_retries=0, **self._client_settings(url))
                    servers.append(_Server(url, await stack.enter_async_context(client)))
                pool = _Pool(servers, settings.concurrency, settings.backoff_s)
                shared = iter(jobs)
                async with asyncio.TaskGroup() as group:
                    for _ in range(min(len(jobs), settings.concurrency * len(servers))):
                        group.create_task(self._work(shared, sampling, pool, arrived))
        except Exception as error:
            first = error.exceptions[0] if isinstance(error, ExceptionGroup) else error
            arrived.put_nowait(first)

    async def _work(
        self,
        jobs: Iterator[Job],
        sampling: Sampling,
        pool: _Pool,
        arrived: asyncio.Queue[Answer | Exception],
    ) -> None:
        for job in jobs:
            arrived.put_nowait(await self._answer(job, sampling, pool))

    async def _answer(self, job: Job, sampling: Sampling, pool: _Pool) -> Answer:
        """Tries until there is an answer, or it is clear that there will be none."""
        tried: list[str] = []
        while True:
            async with pool.slot(tried) as server:
                try:
                    answer = await self._ask(server, job, sampling)
                    server.came_back()
                    return answer
                except (openai.APIError, MalformedError) as error:
                    failure = error
                    tried.append(server.url)
                    if may_pass(failure):
                        pool.set_aside(server, failure)
            told = f"{server.url}: {self._told(failure)}"
            if getattr(failure, "status_code", None) in _HOPELESS:
                raise UserError(f"{told} (answers so far are kept: mend this and run again)")
            if not may_pass(failure):
                return Answer(job.id, "failed", error=told)
            if len(tried) > self._settings.max_retries and not pool.has_other_than(tried):
                pool.require_reachable(told)
                return Answer(job.id, "failed", error=f"{told} ({len(tried)} tries)")
            self.retries[type(failure).__name__] += 1
            await asyncio.sleep(pool.pause(failure, len(tried)))

    async def _ask(self, server: _Server, job: Job, sampling: Sampling) -> Answer:
        request: dict[str, Any] = {"tools": job.tools} if job.tools else {}
        create: Any = server.client.chat.completions.with_raw_response.create
        raw = await create(
            model=self.model,
            messages=to_wire(job.messages),
            max_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            seed=seed_of(sampling.seed, job.id),
            extra_body=self._extra_body,
            **request,
        )
        try:
            body = json.loads(raw.http_response.content)
        except ValueError:
            raise MalformedError("the body is not JSON") from None
        choice = first_choice(body)
        theirs = token_ids(body.get("prompt_token_ids") or choice.get("prompt_token_ids"))
        if self._settings.check_prompt and theirs is not None:
            _require_same_prompt(job, theirs, server.url)
        return read_answer(job.id, choice)

    def _told(self, error: Exception) -> str:
        """One short line, without the key, which servers like to repeat."""
        cause = f" ({error.__cause__})" if error.__cause__ else ""
        text = f"{type(error).__name__}: {error}{cause}"
        if isinstance(error, openai.APIStatusError):
            told = error.body.get("message") if isinstance(error.body, dict) else None
            text = f"HTTP {error.status_code}: {told or error.body or 'no message'}"
        text = " ".join(text.replace(self._key or "\0", "***").split())
        text = text.encode(errors="replace").decode()
        return text if len(text) <= _MOST_TOLD else f"{text[:_MOST_TOLD]}..."


@dataclass
class _Server:
    """failures: in a row. back_at: the loop's time up to which others are preferred."""

    url: str
    client: openai.AsyncOpenAI
    busy: int = 0
    failures: int = 0
    back_at: float = 0.0
    reachable: bool = True

    def came_back(self) -> None:
        self.failures, self.back_at, self.reachable = 0, 0.0, True


class _Pool:
    """Chooses the server of each request: one in order, not yet tried by it, the least busy."""

    def __init__(self, servers: list[_Server], concurrency: int, backoff_s: float) -> None:
        self._servers = servers
        self._concurrency = concurrency
        self._backoff_s = backoff_s
        self._freed = asyncio.Condition()

    @asynccontextmanager
    async def slot(self, tried: Sequence[str]) -> AsyncIterator[_Server]:
        """A server with room for one more request, for as long as that takes."""
        async with self._freed:
            while (server := self._free(tried)) is None:
                await self._freed.wait()
            server.busy += 1
        try:
            yield server
        finally:
            async with self._freed:
                server.busy -= 1
                self._freed.notify_all()

    def has_other_than(self, tried: Sequence[str]) -> bool:
        return any(server.url not in tried for server in self._in_order())

    def set_aside(self, server: _Server, error: Exception) -> None:
        """Prefer others for a while. What was under way with the failure does not count again."""
        # httpx and its successor both call it ConnectError or ConnectTimeout.
        server.reachable = not type(error.__cause__).__name__.startswith("Connect")
        now = asyncio.get_running_loop().time()
        if now >= server.back_at:
            server.failures += 1
            server.back_at = now + pause(error, server.failures, self._backoff_s)

    def pause(self, error: Exception, times: int) -> float:
        """Seconds before the next try: none when another server can take it."""
        return 0.0 if self._in_order() else pause(error, times, self._backoff_s)

    def require_reachable(self, told: str) -> None:
        """Raises: UserError when not even one server can be connected to."""
        if not any(server.reachable for server in self._servers):
            raise UserError(
                f"engine.urls: no server can be reached any more. {told}. Answers so far are "
                "kept: run again when one is up"
            )

    def _in_order(self) -> list[_Server]:
        now = asyncio.get_running_loop().time()
        return [server for server in self._servers if now >= server.back_at]

    def _free(self, tried: Sequence[str]) -> _Server | None:
        fit = self._in_order() or self._servers
        fit = [server for server in fit if server.url not in tried] or fit
        free = [server for server in fit if server.busy < self._concurrency]
        return min(free, key=lambda server: server.busy, default=None)


def may_pass(error: Exception) -> bool:
    """Whether the same request may well succeed later."""
    status = getattr(error, "status_code", None)
    return status is None or status in _PASSING or status >= 500


def pause(error: Exception, times: int, backoff_s: float) -> float:
    """Seconds to wait after the times-th failure: what the server asks for, or ever longer."""
    if isinstance(error, openai.APIStatusError):
        asked = error.response.headers.get("retry-after", "")
        if asked.replace(".", "", 1).isdecimal():
            return min(float(asked), _LONGEST_RETRY_AFTER_S)
    longest = min(backoff_s * 2.0 ** min(times - 1, 30), _LONGEST_PAUSE_S)
    return longest * random.uniform(0.75, 1.0)  # so that not all come back at once


def _require_same_prompt(job: Job, theirs: list[int], url: str) -> None:
    ours = job.prompt_ids
    if theirs == ours:
        return
    pairs = itertools.zip_longest(ours, theirs)
    at = next(i for i, (our, their) in enumerate(pairs) if our != their)
    around = slice(max(at - 3, 0), at + 4)
    raise UserError(
        f"{url} renders the prompt of {job.id} in another way: from token {at} (of {len(ours)} "
        f"here, {len(theirs)} there) ids {around.start}.. are {ours[around]} here and "
        f"{theirs[around]} there. Give both the same tokenizer, template and chat options, or set "
        "engine.check_prompt=false"
    )


async def _next_items(
    arrived: asyncio.Queue[Answer | Exception],
) -> list[Answer | Exception]:
    """Waits for one, and takes what else is there."""
    items = [await arrived.get()]
    while not arrived.empty():
        items.append(arrived.get_nowait())
    return items


async def _end_of(task: asyncio.Task[None]) -> None:
    await task
