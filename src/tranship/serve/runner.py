"""The engine in a thread of its own: asyncio submits requests to it, and gets tokens as they are made.

Only that thread touches the engine. Each request fails alone; a fault of the engine itself ends all that run, is said
on standard error, and the next request finds it working again, or is told that it is not.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import queue
import sys
import threading
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tranship.rollout import GroupRequest, RolloutEngine, SamplesFailed
from tranship.serve.errors import ApiError
from tranship.types import FinishReason, Response, SampleId, Sampling, UserError, sample_seed

_JOIN_S = 30.0


@dataclass(frozen=True)
class Part:
    """Tokens that one sample of a request has made since its last part; finish_reason None: it goes on.

    index: of the sample in the request, prompts first. token_ids int32, logprobs float32, policy_versions int32, [T].
    """

    index: int
    token_ids: np.ndarray
    logprobs: np.ndarray
    policy_versions: np.ndarray
    finish_reason: FinishReason | None


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


class Runner:
    """Steps an engine as long as it has something to do."""

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine
        self._inbox: queue.SimpleQueue[tuple[str, Ticket | None]] = queue.SimpleQueue()
        self._groups = itertools.count()
        self._owner: dict[SampleId, Ticket] = {}
        self._outbox: list[tuple[Ticket, Event]] = []
        self._refusal: ApiError | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether requests can be answered."""
        return self._thread.is_alive() and self._refusal is None

    @property
    def working(self) -> bool:
        """Whether the thread goes on; a fault of one step does not end it."""
        return self._thread.is_alive()

    @property
    def policy_version(self) -> int:
        """The version of the weights in use."""
        return self._engine.policy_version

    @property
    def num_unfinished(self) -> int:
        """Samples that wait or run."""
        return len(self._owner)

    def submit(
        self, prompts: Sequence[np.ndarray], samples_each: int, seed: int, sampling: Sampling, *, streamed: bool
    ) -> Ticket:
        """Ask for so many samples of each prompt, from the event loop's thread.

        prompts: int32 [P] each. A sample's seed follows from `seed`, its prompt's place and its own.
        """
        requests, index = [], {}
        for place, prompt in enumerate(prompts):
            group_id = next(self._groups)
            samples = tuple(SampleId(group_id, number) for number in range(samples_each))
            seeds = tuple(sample_seed(seed, SampleId(place, number)) for number in range(samples_each))
            index |= {sample: len(index) + number for number, sample in enumerate(samples)}
            requests.append(GroupRequest(prompt, samples, seeds, sampling))
        ticket = Ticket(requests, streamed, asyncio.get_running_loop(), index=index)
        self._inbox.put(("submit", ticket))
        if not self._thread.is_alive():
            ticket.events.put_nowait(self._refusal or _stopped())
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Stop what still runs of a request. Any thread, any time."""
        self._inbox.put(("cancel", ticket))

    def refuse(self) -> None:
        """End all that runs, and answer every further request, with an error: the server stops. Any thread."""
        self._inbox.put(("refuse", None))

    def close(self) -> None:
        """End the thread. Whatever runs is stopped."""
        self._inbox.put(("close", None))
        self._thread.join(_JOIN_S)

    def _run(self) -> None:
        try:
            while self._serve_inbox():
                self._step()
                self._deliver()
        except BaseException as error:
            traceback.print_exc(file=sys.stderr)
            self._refusal = _broken(error)
        finally:
            self._refusal = self._refusal or _stopped()
            self._fail_all(self._refusal)
            while not self._inbox.empty():
                word, ticket = self._inbox.get()
                if word == "submit" and ticket is not None:
                    self._outbox.append((ticket, self._refusal))
            self._deliver()

    def _serve_inbox(self) -> bool:
        """Do what was asked since the last step; waits where there is nothing to step. False: the thread ends."""
        while not self._inbox.empty() or not self._owner:
            word, ticket = self._inbox.get()
            if word == "close":
                self._engine.abort()
                return False
            if word == "refuse":
                self._refusal = _stopped()
                self._engine.abort()
                self._fail_all(self._refusal)
            elif ticket is not None and word == "submit":
                self._submit(ticket)
            elif ticket is not None:
                self._drop(ticket)
            self._deliver()
        return True

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
                self._fail(ticket, _broken(error))
                return
        self._outbox.append((ticket, None))

    def _step(self) -> None:
        try:
            finished = self._engine.step()
        except SamplesFailed as error:
            failed = {id(self._owner[sample]): self._owner[sample] for sample in error.samples if sample in self._owner}
            for sample in error.samples:
                owner = self._owner.pop(sample, None)
                if owner is not None:
                    del owner.sent[sample]
            for ticket in failed.values():
                self._fail(ticket, ApiError(500, str(error), code="engine_error"))
            return
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            self._engine.abort()
            self._fail_all(_broken(error))
            return
        for response in finished:
            ticket = self._owner.pop(response.sample)
            start = ticket.sent.pop(response.sample)
            self._outbox.append((ticket, _part(ticket, response, start, response.finish_reason)))
        starts = {sample: ticket.sent[sample] for sample, ticket in self._owner.items() if ticket.streamed}
        for response in self._engine.peek(starts) if starts else ():
            ticket = self._owner[response.sample]
            ticket.sent[response.sample] += len(response.token_ids)
            self._outbox.append((ticket, _part(ticket, response, 0, None)))

    def _fail(self, ticket: Ticket, error: ApiError) -> None:
        self._drop(ticket)
        self._outbox.append((ticket, error))

    def _fail_all(self, error: ApiError) -> None:
        tickets = {id(ticket): ticket for ticket in self._owner.values()}
        self._owner.clear()
        for ticket in tickets.values():
            ticket.sent.clear()
            self._outbox.append((ticket, error))

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
    )


def _broken(error: BaseException) -> ApiError:
    return ApiError(500, f"the engine failed: {type(error).__name__}: {error}", code="engine_error")


def _stopped() -> ApiError:
    return ApiError(503, "the server is stopping", code="server_stopping")
