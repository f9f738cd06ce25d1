"""What a client is told when a request fails: one error in the shape of OpenAI's API."""

from __future__ import annotations

from typing import Any


class ApiError(Exception):
    """A request that fails, alone. status: of HTTP. param: the field that is wrong. code: for programs."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        """The JSON that OpenAI's clients make their exceptions from."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def too_long(num_prompt: int, num_response: int, max_tokens: int, param: str) -> ApiError:
    """The error for a prompt and a cap that do not fit in the context together."""
    return ApiError(
        400,
        f"the context holds {max_tokens} tokens, but the prompt has {num_prompt} and {num_response} were asked for: "
        f"shorten the prompt, or lower {param}",
        param=param,
        code="context_length_exceeded",
    )
