"""Rewards from a server: one POST of JSON for each sample."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from tranship.types import UserError

MAX_ANSWER_BYTES = 1 << 20
_FIRST_PAUSE_S = 0.2
_RETRIED = (429, 500, 502, 503, 504)


class RewardServerError(Exception):
    """The server gave no usable answer."""


class _Again(RewardServerError):
    """It may give one when it is asked again."""


class HttpReward:
    """The reward that `url` (http or https) answers. Asynchronous: many requests are under way at a time.

    Each sample is one POST with a JSON object of data_source, solution_str, ground_truth, extra_info, prompt, messages,
    num_tokens, finish_reason, max_response_tokens, completion_ids and rollout_info, and `more` if given. The answer is
    200 with a JSON object with "score", a number (further entries are kept as extra), or with "masked": true; at most
    1 MiB. retries: how often a request is made again that found no connection or got 429, 500, 502, 503 or 504, after
    0.2, 0.4, 0.8, ... s; all of it has reward.timeout_s. Redirects are not followed. headers: further ones; token_env:
    the environment variable whose value is sent as a bearer token. What goes wrong makes the sample invalid.
    """

    def __init__(
        self,
        url: str,
        retries: int = 2,
        headers: Mapping[str, str] | None = None,
        token_env: str | None = None,
        more: Mapping[str, Any] | None = None,
    ) -> None:
        if urlsplit(url).hostname is None:
            raise UserError(f"{url!r} names no host: write http://host:port/path")
        if not 0 <= retries <= 10:
            raise UserError(f"retries {retries} is not within 0 and 10")
        try:
            self._httpx = importlib.import_module("httpx")
        except ImportError as error:
            raise UserError("httpx is not installed: pip install 'tranship[rewards]'") from error
        sent = dict(headers or {})
        if token_env is not None:
            if not os.environ.get(token_env):
                raise UserError(f"token_env: the environment variable {token_env} is not set")
            sent["Authorization"] = f"Bearer {os.environ[token_env]}"
        self._url = url
        self._retries = retries
        self._more = dict(more or {})
        self._client = self._httpx.AsyncClient(headers=sent, follow_redirects=False, timeout=None)

    async def __call__(
        self,
        data_source: str,
        solution_str: str,
        ground_truth: Any,
        extra_info: dict[str, Any] | None = None,
        *,
        row: dict[str, Any],
    ) -> dict[str, Any]:
        """The server's answer. Raises RewardServerError naming what was wrong with it."""
        content = json.dumps({**row, **self._more}).encode()
        for attempt in range(self._retries):
            try:
                return await self._ask(content)
            except _Again:
                await asyncio.sleep(_FIRST_PAUSE_S * 2**attempt)
        return await self._ask(content)

    async def _ask(self, content: bytes) -> dict[str, Any]:
        try:
            async with self._client.stream(
                "POST", self._url, content=content, headers={"Content-Type": "application/json"}
            ) as response:
                if response.status_code != 200:
                    kind = _Again if response.status_code in _RETRIED else RewardServerError
                    raise kind(f"{self._url} answered {response.status_code} {response.reason_phrase}")
                answer = bytearray()
                async for chunk in response.aiter_bytes():
                    answer += chunk
                    if len(answer) > MAX_ANSWER_BYTES:
                        raise RewardServerError(f"{self._url} answered more than {MAX_ANSWER_BYTES} bytes")
        except self._httpx.HTTPError as error:
            raise _Again(f"{self._url}: {type(error).__name__}: {error}") from error
        return self._parse(bytes(answer))

    def _parse(self, answer: bytes) -> dict[str, Any]:
        try:
            values = json.loads(answer)
        except ValueError as error:
            raise RewardServerError(f"{self._url} answered what is no JSON: {answer[:80]!r}") from error
        if not isinstance(values, dict):
            raise RewardServerError(f"{self._url} answered {answer[:80]!r}, not an object with score")
        return values
