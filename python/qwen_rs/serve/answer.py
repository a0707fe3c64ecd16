"""An answer on its way to a client, whole or as server-sent events; and what happens when the client goes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from .errors import RequestError
from .forms import Form
from .worker import Reader, Worker


def failure(error: RequestError) -> Response:
    """An error as a response."""
    headers = {} if error.retry_after is None else {"retry-after": str(error.retry_after)}
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return as_json(error.body(), error.status, headers)


def as_json(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, "application/json")


class Answer:
    """An ASGI application for one request whose sequences are in the queue.

    A client that goes away is noticed at any time, and its sequences are cancelled.
    """

    def __init__(
        self,
        worker: Worker,
        readers: list[Reader],
        form: Form,
        *,
        stream: bool,
        include_usage: bool,
        timeout: float | None,
    ) -> None:
        self.worker, self.readers, self.form = worker, readers, form
        self.stream, self.include_usage, self.timeout = stream, include_usage, timeout
        self.deadline = None if timeout is None else time.monotonic() + timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answering = asyncio.ensure_future(self._answer(scope, receive, send))
        watching = asyncio.ensure_future(_gone(receive))
        try:
            # A reader that takes nothing holds ``send``: past the deadline the connection goes.
            await asyncio.wait(
                {answering, watching},
                timeout=None if self.timeout is None else self.timeout + 1,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if answering.done():
                answering.result()
        finally:
            self.worker.cancel(self.readers)
            for task in (answering, watching):
                task.cancel()
            await asyncio.gather(answering, watching, return_exceptions=True)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.stream:
            await self._send_events(scope, receive, send)
            return
        try:
            async for _ in self._news():
                pass
            response = as_json(self.form.whole())
        except RequestError as error:
            response = failure(error)
        await response(scope, receive, send)

    async def _send_events(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False
        try:
            async for index, text, first, end, last in self._news():
                chunks = self.form.chunk(index, text, first, end, last=last)
                if not begun:  # a request that fails before its first token has the status of its error
                    begun = True
                    await send(_start())
                if chunks:
                    await send(_body(b"".join(map(_event, chunks))))
            if self.include_usage:
                await send(_body(_event(self.form.usage_chunk())))
        except RequestError as error:
            if not begun:
                await failure(error)(scope, receive, send)
                return
            await send(_body(_event(error.body())))
        await send(_body(b"data: [DONE]\n\n", more=False))

    async def _news(self) -> AsyncIterator[tuple[int, str, int, int, bool]]:
        """(choice, text, first token, end, whether it is the last), until all have ended."""
        changed = self.readers[0].changed
        while not all(reader.ended for reader in self.readers):
            try:
                left = None if self.deadline is None else self.deadline - time.monotonic()
                await asyncio.wait_for(changed.wait(), left)
            except asyncio.TimeoutError:
                raise RequestError(503, f"the request took longer than {self.timeout:g} seconds") from None
            changed.clear()
            for index, reader in enumerate(self.readers):
                first = reader.taken
                if (news := reader.take()) is None:
                    continue
                if (error := reader.sequence.error) is not None and reader.ended:
                    raise error if isinstance(error, RequestError) else RequestError(500, str(error))
                yield index, news.text, first, news.tokens, reader.ended


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _start() -> Message:
    headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
    return {"type": "http.response.start", "status": 200, "headers": headers}


def _body(body: bytes, *, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}


def _event(data: Any) -> bytes:
    return b"data: " + msgspec.json.encode(data) + b"\n\n"
