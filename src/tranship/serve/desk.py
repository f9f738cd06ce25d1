"""Where requests wait for an engine: any thread hands them in, the engine's thread takes them up and hands out tokens.

A desk steps nothing. Whoever steps the engine calls `take_up` before a step and `hand_out` (or `failed`) after it.
Each request fails alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import queue
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from tranship.rollout import GroupRequest, RolloutEngine, SamplesFailed
from tranship.serve.errors import ApiError
from tranship.types import FinishReason, Response, SampleId, Sampling, TopLogprobs, UserError, sample_seed

_ATTEMPT = -1
"""Of every sample that is asked for here: no sample of a run has it, so the two never meet in one engine."""


@dataclass(frozen=True)
class Part:
    """Tokens that one sample of a request has made since its last part; finish_reason None: it goes on.

    index: of the sample in the request, prompts first. token_ids int32, logprobs float32, policy_versions int32, [T].
    top: the likeliest tokens at these places, where the request asked for them.
    """

    index: int
    token_ids: np.ndarray
    logprobs: np.ndarray
    policy_versions: np.ndarray
    finish_reason: FinishReason | None
    top: TopLogprobs | None = None


Event = Part | ApiError | None
"""What a ticket waits for: tokens, what went wrong, or (once, first) that the engine has taken the request."""


@dataclass(eq=False)
class Ticket:
    """One request that was submitted. requests: one for each prompt. streamed: parts come with every step.

    sent: how many tokens of each unfinished sample were delivered.
    """

    requests: Sequence[GroupRequest]
    streamed: bool
    loop: asyncio.AbstractEventLoop
    events: asyncio.Queue[Event] = field(default_factory=asyncio.Queue)
    index: dict[SampleId, int] = field(default_factory=dict)
    sent: dict[SampleId, int] = field(default_factory=dict)

    async def next(self) -> Part | None:
        """What comes next; None means that the engine has taken the request. Raises ApiError."""
        event = await self.events.get()
        if isinstance(event, ApiError):
            raise event
        return event


class Desk:
    """Requests of clients for one engine. wakeup: called, from any thread, when something was handed in."""

    def __init__(self, engine: RolloutEngine, wakeup: Callable[[], None] = lambda: None) -> None:
        self._engine = engine
        self._wakeup = wakeup
        self._inbox: queue.SimpleQueue[tuple[str, Ticket | None]] = queue.SimpleQueue()
        self._groups = itertools.count()
        self._owner: dict[SampleId, Ticket] = {}
        self._outbox: list[tuple[Ticket, Event]] = []
        self._refusal: ApiError | None = None
        self._closed = False

    # Any thread

    @property
    def alive(self) -> bool:
        """Whether requests can be answered."""
        return self._refusal is None

    @property
    def policy_version(self) -> int:
        """The version of the weights in use."""
        return self._engine.policy_version

    @property
    def num_unfinished(self) -> int:
        """Samples that wait or run."""
        return len(self._owner)

    @property
    def has_mail(self) -> bool:
        """Whether something was handed in that was not taken up yet."""
        return not self._inbox.empty()

    def submit(
        self,
        prompts: Sequence[np.ndarray],
        samples_each: int,
        seed: int,
        sampling: Sampling,
        *,
        streamed: bool,
        goes_on: bool = False,
    ) -> Ticket:
        """Ask for so many samples of each prompt, from an event loop's thread.

        prompts: int32 [P] each. A sample's seed follows from `seed`, its prompt's place and its own. goes_on: as in
        `GroupRequest`.
        """
        requests, index = [], {}
        for place, prompt in enumerate(prompts):
            group_id = next(self._groups)
            samples = tuple(SampleId(group_id, number, _ATTEMPT) for number in range(samples_each))
            seeds = tuple(sample_seed(seed, SampleId(place, number)) for number in range(samples_each))
            index |= {sample: len(index) + number for number, sample in enumerate(samples)}
            requests.append(GroupRequest(prompt, samples, seeds, sampling, goes_on=goes_on))
        ticket = Ticket(requests, streamed, asyncio.get_running_loop(), index=index)
        self._hand_in("submit", ticket)
        if self._closed and self._refusal is not None:
            ticket.events.put_nowait(self._refusal)
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Stop what still runs of a request."""
        self._hand_in("cancel", ticket)

    def refuse(self) -> None:
        """End all that runs, and answer every further request, with an error: the server stops."""
        self._hand_in("refuse", None)

    def _hand_in(self, word: str, ticket: Ticket | None) -> None:
        self._inbox.put((word, ticket))
        self._wakeup()

    # The engine's thread

    def take_up(self, timeout_s: float = 0.0) -> None:
        """Do what was asked since the last step; with a limit, wait so long for something."""
        with contextlib.suppress(queue.Empty):
            while True:
                word, ticket = self._inbox.get(timeout=timeout_s) if timeout_s else self._inbox.get_nowait()
                timeout_s = 0.0
                if ticket is None:
                    self.end(stopping())
                elif word == "submit":
                    self._submit(ticket)
                else:
                    self._drop(ticket)
        self._deliver()

    def hand_out(self, finished: Sequence[Response]) -> list[Response]:
        """Deliver what a step made; returns the responses that nobody asked for here."""
        others = []
        for response in finished:
            ticket = self._owner.pop(response.sample, None)
            if ticket is None:
                others.append(response)
            else:
                start = ticket.sent.pop(response.sample)
                self._outbox.append((ticket, _part(ticket, response, start, response.finish_reason)))
        starts = {sample: ticket.sent[sample] for sample, ticket in self._owner.items() if ticket.streamed}
        for response in self._engine.peek(starts) if starts else ():
            ticket = self._owner[response.sample]
            ticket.sent[response.sample] += len(response.token_ids)
            self._outbox.append((ticket, _part(ticket, response, 0, None)))
        self._deliver()
        return others

    def failed(self, error: SamplesFailed) -> list[SampleId]:
        """Tell those whose samples the engine has dropped; returns the samples that nobody asked for here."""
        tickets: dict[int, Ticket] = {}
        others = []
        for sample in error.samples:
            ticket = self._owner.pop(sample, None)
            if ticket is None:
                others.append(sample)
            else:
                del ticket.sent[sample]
                tickets[id(ticket)] = ticket
        for ticket in tickets.values():
            self._fail(ticket, ApiError(500, str(error), code="engine_error"))
        self._deliver()
        return others

    def fail_all(self, error: ApiError) -> None:
        """End all that runs here with an error. The engine may have dropped it already."""
        tickets = {id(ticket): ticket for ticket in self._owner.values()}
        for ticket in tickets.values():
            self._fail(ticket, error)
        self._deliver()

    def end(self, error: ApiError) -> None:
        """The same, for every further request too."""
        self._refusal = error
        self.fail_all(error)

    def close(self, error: ApiError) -> None:
        """Answer everything with an error from now on. It leaves the engine alone; nothing is taken up after it."""
        self._refusal, self._closed = error, True
        tickets = {id(ticket): ticket for ticket in self._owner.values()}
        self._owner.clear()
        waiting = list(tickets.values())
        with contextlib.suppress(queue.Empty):
            while True:
                word, ticket = self._inbox.get_nowait()
                waiting += [ticket] if word == "submit" and ticket is not None else []
        self._outbox += [(ticket, error) for ticket in waiting]
        self._deliver()

    def _submit(self, ticket: Ticket) -> None:
        if self._refusal is not None:
            self._outbox.append((ticket, self._refusal))
            return
        for request in ticket.requests:
            self._owner.update(dict.fromkeys(request.samples, ticket))
            ticket.sent.update(dict.fromkeys(request.samples, 0))
            try:
                self._engine.submit(request)
            except UserError as error:
                self._fail(ticket, ApiError(400, str(error), code="invalid_value"))
                return
            except Exception as error:
                traceback.print_exc(file=sys.stderr)
                self._fail(ticket, broken(error))
                return
        self._outbox.append((ticket, None))

    def _fail(self, ticket: Ticket, error: ApiError) -> None:
        self._outbox.append((ticket, error))
        self._drop(ticket)

    def _drop(self, ticket: Ticket) -> None:
        """Stop the samples of a request that are not finished."""
        left = list(ticket.sent)
        ticket.sent.clear()
        for sample in left:
            self._owner.pop(sample, None)
        if left:
            self._engine.abort(left)

    def _deliver(self) -> None:
        events, self._outbox = self._outbox, []
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Ticket, Event]]] = {}
        for ticket, event in events:
            by_loop.setdefault(ticket.loop, []).append((ticket, event))
        for loop, its in by_loop.items():
            with contextlib.suppress(RuntimeError):  # The loop has ended, and nobody waits any more.
                loop.call_soon_threadsafe(_hand_over, its)


def broken(error: BaseException) -> ApiError:
    """What clients are told of a fault of the engine."""
    return ApiError(500, f"the engine failed: {type(error).__name__}: {error}", code="engine_error")


def stopping() -> ApiError:
    """What clients are told at the end."""
    return ApiError(503, "the server is stopping", code="server_stopping")


def _hand_over(events: Sequence[tuple[Ticket, Event]]) -> None:
    for ticket, event in events:
        ticket.events.put_nowait(event)


def _part(ticket: Ticket, response: Response, start: int, reason: FinishReason | None) -> Part:
    return Part(
        ticket.index[response.sample],
        response.token_ids[start:],
        response.logprobs[start:],
        response.policy_versions[start:],
        reason,
        None if response.top is None else response.top[start:],
    )
