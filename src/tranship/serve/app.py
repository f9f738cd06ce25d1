"""The endpoint: OpenAI's routes over one engine. Every request but /health shows the bearer token."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from tranship.serve.agents import AgentSamples, ClaimRequest, Recording, RewardReport, begin, claim, end
from tranship.serve.answers import ChatStyle, Choices, CompletionStyle, Piece
from tranship.serve.desk import Desk, Ticket, stopping
from tranship.serve.errors import ApiError
from tranship.serve.load import Served
from tranship.serve.prompts import Prompts
from tranship.serve.requests import ChatRequest, CompletionRequest, Request, parse
from tranship.serve.text import TokenTexts, decoder
from tranship.types import Sampling

MOST_BODY_BYTES = 32 << 20
_CLOSED = 499

Handler = Callable[[HttpRequest], Awaitable[Response]]
R = TypeVar("R", bound=Request)
M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")


@dataclass(frozen=True)
class Job:
    """What a request asks the engine for. with_tools: calls are read out of the text. seed: None: the request's.
    recording: of the sample that the answer is a turn of."""

    prompts: Sequence[np.ndarray]
    sampling: Sampling
    with_tools: bool = False
    seed: int | None = None
    recording: Recording | None = None


class Endpoint:
    """Answers requests for one served model by one desk. token: what clients must show. samples: those of a run, that
    agents may make; None: there are none."""

    def __init__(self, served: Served, desk: Desk, token: str, samples: AgentSamples | None = None) -> None:
        self._served = served
        self._desk = desk
        self._samples = samples
        self._token = token.encode()
        self._started = int(time.time())
        self._prompts = Prompts(served.prompt_tokenizer, served.max_tokens)
        # One thread: long prompts must not hold up the others' answers, and the tokenizer is not for several.
        self._encoding = ThreadPoolExecutor(1, thread_name_prefix="prompts")
        self._tokens = TokenTexts(decoder(served.tokenizer, skip_special_tokens=False))

    def app(self) -> Starlette:
        """The ASGI application."""
        routes = [
            Route("/health", self._health, methods=["GET"]),
            Route("/v1/models", self._guarded(self._models), methods=["GET"]),
            Route("/v1/models/{name:path}", self._guarded(self._model), methods=["GET"]),
            Route("/v1/completions", self._guarded(self._completions), methods=["POST"]),
            Route("/v1/chat/completions", self._guarded(self._chat), methods=["POST"]),
            Route("/v1/tranship/samples", self._guarded(self._claim), methods=["POST"]),
            Route("/v1/tranship/reward", self._guarded(self._reward), methods=["POST"]),
        ]
        return Starlette(routes=routes, exception_handlers={HTTPException: _http_error, Exception: _bug})

    def _guarded(self, handler: Handler) -> Handler:
        """The handler for those who show the token; what it raises becomes an answer."""

        async def guarded(request: HttpRequest) -> Response:
            try:
                self._check_token(request)
                return await handler(request)
            except ApiError as error:
                return JSONResponse(error.body(), error.status)
            except ClientDisconnect:
                return Response(status_code=_CLOSED)

        return guarded

    def _check_token(self, request: HttpRequest) -> None:
        kind, _, shown = request.headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer" or not hmac.compare_digest(shown.strip().encode(), self._token):
            raise ApiError(401, "the API key is missing or wrong: give the token of the server", code="invalid_api_key")

    async def _health(self, request: HttpRequest) -> Response:
        alive = self._desk.alive
        facts = {"status": "ok" if alive else "stopped", "num_unfinished": self._desk.num_unfinished}
        return JSONResponse(facts, 200 if alive else 503)

    async def _models(self, request: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def _model(self, request: HttpRequest) -> Response:
        self._check_model(request.path_params["name"])
        return JSONResponse(self._card())

    def _card(self) -> dict[str, Any]:
        return {
            "id": self._served.name,
            "object": "model",
            "created": self._started,
            "owned_by": "tranship",
            "max_model_len": self._served.max_tokens,
            "policy_version": self._desk.policy_version,
        }

    def _check_model(self, name: str) -> None:
        if name != self._served.name:
            message = f"there is no model {name!r} here, only {self._served.name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    async def _read(self, request: HttpRequest, kind: type[R]) -> R:
        asked = await self._body(request, kind)
        self._check_model(asked.model)
        return asked

    async def _body(self, request: HttpRequest, kind: type[M]) -> M:
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > MOST_BODY_BYTES:
                raise ApiError(413, f"the body has more than {MOST_BODY_BYTES >> 20} MiB: send less at a time")
        return parse(kind, bytes(body))

    async def _encoded(self, work: Callable[[M], T], asked: M) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._encoding, work, asked)

    async def _completions(self, request: HttpRequest) -> Response:
        asked = await self._read(request, CompletionRequest)
        prompts, cap = await self._encoded(self._prompts.of_completion, asked)
        wanted = asked.logprobs is not None
        style = CompletionStyle(self._served.name, self._tokens, wanted, asked.return_token_ids, want_offsets=wanted)
        return await self._answer(request, asked, Job(prompts, asked.sampling(cap)), style)

    async def _chat(self, request: HttpRequest) -> Response:
        asked = await self._read(request, ChatRequest)
        if asked.sample is not None:
            return await self._turn(request, asked, asked.sample)
        prompt, cap = await self._encoded(self._prompts.of_chat, asked)
        job = Job([prompt], asked.sampling(cap), with_tools=bool(asked.offered_tools))
        return await self._answer(request, asked, job, self._chat_style(asked))

    def _chat_style(self, asked: ChatRequest) -> ChatStyle:
        return ChatStyle(self._served.name, self._tokens, bool(asked.logprobs), asked.return_token_ids)

    def _agent_samples(self) -> AgentSamples:
        if self._samples is None:
            message = "no samples are made by agents here: that needs a run with serve.agents=true"
            raise ApiError(404, message, param="sample", code="sample_not_found")
        return self._samples

    async def _claim(self, request: HttpRequest) -> Response:
        samples, asked = self._agent_samples(), await self._body(request, ClaimRequest)
        return JSONResponse(await _while_connected(request, claim(samples, asked.wait_s, self._refusal)))

    async def _reward(self, request: HttpRequest) -> Response:
        samples, report = self._agent_samples(), await self._body(request, RewardReport)
        return JSONResponse(await self._encoded(lambda told: end(samples, told), report))

    def _refusal(self) -> ApiError | None:
        return None if self._desk.alive else stopping()

    async def _turn(self, request: HttpRequest, asked: ChatRequest, key: str) -> Response:
        """The answer to a request that makes a turn of a run's sample."""
        samples = self._agent_samples()
        recording = await self._encoded(lambda its: begin(samples, key, its), asked)
        turn = recording.turn
        sampling = replace(turn.sampling, top_logprobs=asked.num_top)
        job = Job([turn.prompt_ids], sampling, bool(asked.offered_tools), turn.seed, recording)
        return await self._answer(request, asked, job, self._chat_style(asked))

    async def _answer(
        self, request: HttpRequest, asked: Request, job: Job, style: CompletionStyle | ChatStyle
    ) -> Response:
        seed = asked.seed if job.seed is None else job.seed
        seed = secrets.randbits(63) if seed is None else seed
        decode = decoder(self._served.tokenizer, skip_special_tokens=asked.skip_special_tokens)
        choices = Choices(job.prompts, asked.num_samples, decode, job.sampling.stop_strings, job.with_tools)
        ticket = self._desk.submit(
            job.prompts,
            asked.num_samples,
            seed,
            job.sampling,
            streamed=bool(asked.stream),
            goes_on=isinstance(asked, ChatRequest),
        )
        handed_over = False
        try:
            if not asked.stream:
                pieces = await _while_connected(request, self._collect(ticket, choices, style, job.recording))
                return JSONResponse(style.whole(pieces, choices))
            await _while_connected(request, ticket.next())
            stream = self._stream(ticket, choices, style, job.recording, asked.include_usage)
            handed_over = True
            return StreamingResponse(
                stream,
                media_type="text/event-stream",
                headers={"cache-control": "no-store"},
                # For a client that went away before the stream began.
                background=BackgroundTask(self._cancel, ticket, job.recording),
            )
        finally:
            if not handed_over:
                self._cancel(ticket, job.recording)

    def _cancel(self, ticket: Ticket, recording: Recording | None) -> None:
        self._desk.cancel(ticket)
        if recording is not None:
            recording.close()

    async def _collect(
        self, ticket: Ticket, choices: Choices, style: CompletionStyle | ChatStyle, recording: Recording | None
    ) -> list[Piece]:
        """The pieces of all choices, in their order."""
        found: dict[int, Piece] = {}
        while choices.num_done < choices.num:
            part = await ticket.next()
            if part is not None:
                found[part.index] = choices.accept(part, style.want_offsets)
                if recording is not None:
                    recording.add(found[part.index])
        return [found[index] for index in range(choices.num)]

    async def _stream(
        self,
        ticket: Ticket,
        choices: Choices,
        style: CompletionStyle | ChatStyle,
        recording: Recording | None,
        include_usage: bool,
    ) -> AsyncIterator[str]:
        """Server-sent events. Leaving it early, as when the client goes away, stops the samples."""
        extra = {"usage": None} if include_usage else {}
        begun: set[int] = set()
        try:
            for chunk in style.begin(choices, self._desk.policy_version):
                yield _event(chunk | extra)
            while choices.num_done < choices.num:
                part = await ticket.next()
                if part is None:
                    continue
                piece = choices.accept(part, style.want_offsets)
                if recording is not None:
                    recording.add(piece)
                if piece.text or style.want_logprobs or style.want_ids or part.finish_reason is not None:
                    yield _event(style.chunk(piece, choices, part.index not in begun) | extra)
                    begun.add(part.index)
            if include_usage:
                yield _event(style.end(choices, self._desk.policy_version))
            yield "data: [DONE]\n\n"
        except ApiError as error:
            yield _event(error.body())
        finally:
            self._cancel(ticket, recording)


async def _while_connected(request: HttpRequest, work: Awaitable[T]) -> T:
    """What `work` gives; it is cancelled, and ClientDisconnect raised, when the client goes away before."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await each


async def _disconnected(request: HttpRequest) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(',', ':'))}\n\n"


async def _http_error(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    wrong = ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
    return JSONResponse(wrong.body(), error.status_code, headers=error.headers)


async def _bug(request: HttpRequest, error: Exception) -> Response:
    return JSONResponse(ApiError(500, f"{type(error).__name__}: {error}").body(), 500)
