"""The ASGI application: its routes, and what stands before them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import json
import sys
import time
import traceback
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..engine.prompts import check_ids
from .answer import Answer, as_json, failure
from .errors import RequestError
from .options import Options
from .protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest, decode
from .service import Service

MAX_BODY = 64 << 20
"""Bytes of a request."""
BEAT_SECONDS = 60.0
"""An engine that has ended no step for so long is taken for dead."""
OPEN_ROUTES = ("/health",)
"""What needs no key."""


class State:
    """What the routes know.

    Attributes:
        service: the model, once it is loaded.
        draining: the server is to end: it takes no more requests.
    """

    def __init__(self, options: Options, load: Callable[[], Any]) -> None:
        self.options, self.load = options, load
        self.service: Service | None = None
        self.draining = False
        self.failure: BaseException | None = None
        self.loaded = asyncio.Event()

    def ready(self) -> Service:
        """
        Raises:
            RequestError: there is nothing that could answer, and why.
        """
        if self.service is None:
            raise RequestError(503, "the model is being loaded", retry_after=5)
        worker = self.service.worker
        if self.draining:
            raise RequestError(503, "the server is shutting down", retry_after=30)
        if worker.failure is not None:
            raise RequestError(503, f"the engine has failed: {worker.failure}")
        silent = time.monotonic() - worker.beat
        if silent > BEAT_SECONDS:
            raise RequestError(503, f"the engine has ended no step for {silent:.0f} seconds")
        return self.service


def _state(request: Request) -> State:
    state = request.app.state.serving
    assert isinstance(state, State)
    return state


async def _body(request: Request) -> bytes:
    declared = request.headers.get("content-length", "")
    body = bytearray()
    if not (declared.isdecimal() and int(declared) > MAX_BODY):
        async for part in request.stream():
            body += part
            if len(body) > MAX_BODY:
                break
        else:
            return bytes(body)
    raise RequestError(413, f"the request is larger than {MAX_BODY} bytes")


async def chat_completions(request: Request) -> Answer:
    service = _state(request).ready()
    return await service.chat(decode(await _body(request), ChatRequest))


async def completions(request: Request) -> Answer:
    service = _state(request).ready()
    return await service.complete(decode(await _body(request), CompletionRequest))


def _card(service: Service) -> dict[str, Any]:
    return {
        "id": service.name,
        "object": "model",
        "created": service.created,
        "owned_by": "qwen-rs",
        "max_model_len": service.max_context,
    }


async def models(request: Request) -> Response:
    return as_json({"object": "list", "data": [_card(_state(request).ready())]})


async def model(request: Request) -> Response:
    service = _state(request).ready()
    service.check_model(request.path_params["name"])
    return as_json(_card(service))


async def health(request: Request) -> Response:
    _state(request).ready()
    return as_json({"status": "ok"})


async def tokenize(request: Request) -> Response:
    service = _state(request).ready()
    asked = decode(await _body(request), TokenizeRequest)
    service.check_model(asked.model)
    tokens = await asyncio.to_thread(service.llm.tokenizer.encode, asked.prompt)
    return as_json({"tokens": tokens, "count": len(tokens), "max_model_len": service.max_context})


async def detokenize(request: Request) -> Response:
    service = _state(request).ready()
    asked = decode(await _body(request), DetokenizeRequest)
    service.check_model(asked.model)
    try:
        check_ids(asked.tokens, int(service.llm.config["vocab_size"]))
    except ValueError as error:
        raise RequestError(400, f"tokens: {error}", param="tokens") from None
    decoded = functools.partial(service.llm.tokenizer.decode, skip_special_tokens=False)
    return as_json({"prompt": await asyncio.to_thread(decoded, asked.tokens)})


async def metrics(request: Request) -> Response:
    service = _state(request).service
    if service is None:
        raise RequestError(503, "the model is being loaded", retry_after=5)
    return Response(service.worker.measures.text(), media_type=CONTENT_TYPE_LATEST)


ROUTES = [
    Route("/v1/chat/completions", chat_completions, methods=["POST"]),
    Route("/v1/completions", completions, methods=["POST"]),
    Route("/v1/models", models, methods=["GET"]),
    Route("/v1/models/{name:path}", model, methods=["GET"]),
    Route("/tokenize", tokenize, methods=["POST"]),
    Route("/detokenize", detokenize, methods=["POST"]),
    Route("/metrics", metrics, methods=["GET"]),
    Route("/health", health, methods=["GET"]),
]


class Entrance:
    """Gives each request its number, asks for the key, and logs: who, what, how long, never what was said."""

    def __init__(self, app: ASGIApp, *, api_key: str | None) -> None:
        self._app = app
        self._key = None if api_key is None else api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        number = given if given.isalnum() and len(given) <= 128 else uuid.uuid4().hex.encode()
        started, status = time.perf_counter(), 0

        async def tagged(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", number)]
            await send(message)

        try:
            if self._admits(scope, headers):
                await self._app(scope, receive, tagged)
            else:
                await failure(RequestError(401, "the API key is missing or wrong"))(scope, receive, tagged)
        except Exception as error:
            traceback.print_exc()
            fault = RequestError(500, f"a fault of the server: {type(error).__name__}: {error}")
            if not status:
                await failure(fault)(scope, receive, tagged)
        finally:
            entry = {
                "time": round(time.time(), 3),
                "client": (scope.get("client") or ("",))[0],
                "method": scope["method"],
                "path": scope["path"],
                "status": status,
                "milliseconds": round(1000 * (time.perf_counter() - started), 1),
                "request": number.decode("latin-1"),
            }
            print(json.dumps(entry), file=sys.stderr, flush=True)

    def _admits(self, scope: Scope, headers: dict[bytes, bytes]) -> bool:
        if self._key is None or scope["path"] in OPEN_ROUTES:
            return True
        kind, _, key = headers.get(b"authorization", b"").partition(b" ")
        return hmac.compare_digest(key.strip(), self._key) and kind.lower() == b"bearer"


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return failure(error)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    told = f"{request.method} {request.url.path}: {error.detail}"
    response = failure(RequestError(error.status_code, told))
    response.headers.update(error.headers or {})
    return response


async def _client_gone(_: Request, __: Exception) -> Response:
    return failure(RequestError(400, "the client went away"))  # nobody hears it


def application(state: State) -> Starlette:
    """The application; the model is loaded while it runs."""
    options = state.options

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async def load() -> None:
            try:
                llm = await asyncio.to_thread(state.load)
                state.service = Service(llm, options)
            except BaseException as error:
                state.failure = error
            finally:
                state.loaded.set()

        loading = asyncio.create_task(load())
        try:
            yield
        finally:
            await loading
            if state.service is not None:
                await asyncio.to_thread(state.service.worker.close)

    middleware = [Middleware(Entrance, api_key=options.api_key)]
    if options.cors:
        cors = Middleware(
            CORSMiddleware, allow_origins=options.cors, allow_methods=["*"], allow_headers=["*"]
        )
        middleware.insert(0, cors)  # a browser's question before the request carries no key
    app = Starlette(
        routes=ROUTES,
        middleware=middleware,
        lifespan=lifespan,
        exception_handlers={
            RequestError: _refused,
            HTTPException: _http_error,
            ClientDisconnect: _client_gone,
        },
    )
    app.router.redirect_slashes = False
    app.state.serving = state
    return app
