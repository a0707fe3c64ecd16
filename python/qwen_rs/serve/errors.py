"""What is wrong with a request, in OpenAI's shape."""

from __future__ import annotations

from typing import Any

KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}
"""OpenAI's ``type`` of each status that is given."""


class RequestError(Exception):
    """A request that is not served.

    Args:
        status: one of ``KINDS``.
        message: what is wrong, and what to do.
        param: the field that is wrong.
        retry_after: seconds after which it is worth another try.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, retry_after: int | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.retry_after = status, param, retry_after

    def body(self) -> dict[str, Any]:
        kind = KINDS.get(self.status, KINDS[500 if self.status >= 500 else 400])
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.status}}
