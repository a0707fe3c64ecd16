"""Runs the application: sockets, TLS, signals."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from types import FrameType

import uvicorn

from ..engine.llm import LLM
from .app import State, application
from .options import Options

STEP_GOAL_MS = 100.0
"""What a step should take at most, so that a long prompt does not hold up everybody's streams."""
BACKLOG = 2048


class Server(uvicorn.Server):
    """A server that on SIGTERM or Ctrl-C lets the requests that run end; a second signal ends it at once."""

    state: State
    _loop: asyncio.AbstractEventLoop | None = None
    _draining: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._loop is None or self.state.draining:
            self.should_exit = self.force_exit = True
            return
        self.state.draining = True
        self._loop.call_soon_threadsafe(self._drain_soon)

    def _drain_soon(self) -> None:
        self._draining = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.state.options.shutdown_timeout
        while (service := self.state.service) is not None and service.worker.live:
            if loop.time() > deadline:
                break
            await asyncio.sleep(0.05)
        self.should_exit = True

    async def run_until_told(self, listener: socket.socket) -> None:
        """Serves until a signal, or until the model cannot be loaded."""
        self._loop = asyncio.get_running_loop()
        serving = asyncio.create_task(self.serve([listener]))
        loaded = asyncio.create_task(self.state.loaded.wait())
        await asyncio.wait({serving, loaded}, return_when=asyncio.FIRST_COMPLETED)
        loaded.cancel()
        if self.state.failure is not None:
            self.should_exit = True
        elif (service := self.state.service) is not None:
            counters = service.worker.generation.engine.counters()
            scheme = "https" if self.state.options.tls_cert else "http"
            host, port = listener.getsockname()[:2]
            host = f"[{host}]" if ":" in host else host
            print(
                f"qwen-rs serve: {service.name} at {scheme}://{host}:{port}/v1, "
                f"{counters['blocks']} cache blocks, up to {service.llm.max_num_seqs} sequences together",
                file=sys.stderr,
                flush=True,
            )
        await serving
        if self.state.failure is not None:
            raise self.state.failure


def serve(options: Options) -> None:
    """Serves until it is told to end.

    Raises:
        OSError: the address cannot be listened on, or a file cannot be read.
        as ``LLM``.
    """
    listener = _listen(options.host, options.port)
    with listener:
        asyncio.run(_serve(options, listener))


async def _serve(options: Options, listener: socket.socket) -> None:
    def load() -> LLM:
        return LLM(
            options.model,
            dtype=options.dtype,
            kv="paged",
            kv_dtype=options.kv_dtype,
            threads=options.threads,
            max_context=options.max_context,
            max_num_seqs=options.max_num_seqs,
            kv_memory=options.kv_memory,
            step_goal_ms=STEP_GOAL_MS,
        )

    state = State(options, load)
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    config = uvicorn.Config(
        application(state),
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="on",
        ssl_certfile=options.tls_cert,
        ssl_keyfile=options.tls_key,
        timeout_graceful_shutdown=max(1, int(options.shutdown_timeout)),
    )
    server = Server(config)
    server.state = state
    await server.run_until_told(listener)


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
        return listener
    except OSError as error:
        raise OSError(f"{host}:{port}: {error.strerror or error}") from None
