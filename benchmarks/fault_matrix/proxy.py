"""A TCP proxy that can be told to behave badly, in front of a service that itself is well."""

import asyncio
import socket
import struct
import threading
from collections.abc import Coroutine
from contextlib import closing, suppress
from typing import Any

HOST = "127.0.0.1"
_BLOCK_BYTES = 65_536
_SLOW_S = 0.3
"""Pause before each block of a slow connection."""
_DRIP_S = 0.5
"""Pause before each byte of an answer whose headers come slowly."""
_CUT_BYTES = 150
"""Length of an answer that is cut off: the status line and some headers."""


class Proxy:
    """Listens on a port of its own and passes bytes on, or misbehaves.

    `mode` is one of pass, down, black hole, slow, slow headers and cut body.
    """

    def __init__(self, host_and_port: tuple[str, int]) -> None:
        self.mode = "pass"
        self.port = 0
        self._target = host_and_port
        self._loop = asyncio.new_event_loop()
        self._clients = set[asyncio.StreamWriter]()
        self._lets_through = asyncio.Event()
        self._lets_through.set()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        # The port is chosen once: after an outage the proxy listens on the same one.
        self._do(self._listen())

    def set(self, mode: str) -> None:
        """Behave like this from now on, to connections that are open as well."""
        self._do(self._change(mode))

    def close(self) -> None:
        """Stop listening, and drop every connection."""
        self.set("down")
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(
            self._serve, HOST, self.port, backlog=512, reuse_address=True
        )
        self.port = self._server.sockets[0].getsockname()[1]

    async def _change(self, mode: str) -> None:
        was_down = self.mode == "down"
        self.mode = mode
        if mode == "black hole":
            self._lets_through.clear()
        else:
            self._lets_through.set()
        if mode == "down":
            self._server.close()
            # A reset connection leaves the set while it is looped over.
            for client in tuple(self._clients):
                _reset(client)
        elif was_down:
            await self._listen()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            service_reader, service_writer = await asyncio.open_connection(*self._target)
        except OSError:
            _reset(writer)
            return
        self._clients.add(writer)
        try:
            await asyncio.gather(
                self._pump(reader, service_writer, answers=False),
                self._pump(service_reader, writer, answers=True),
                return_exceptions=True,
            )
        finally:
            self._clients.discard(writer)
            service_writer.close()
            writer.close()

    async def _pump(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, answers: bool
    ) -> None:
        """Pass one direction of a connection on, until its source ends."""
        with closing(sink):
            while block := await source.read(_BLOCK_BYTES):
                await self._lets_through.wait()
                if self.mode == "slow":
                    await asyncio.sleep(_SLOW_S)
                if answers and self.mode == "cut body":
                    sink.write(block[:_CUT_BYTES])
                    await sink.drain()
                    break
                # The mode may change between two bytes: what is left of the block then goes at
                # once.
                while answers and self.mode == "slow headers" and block:
                    sink.write(block[:1])
                    await asyncio.sleep(_DRIP_S)
                    block = block[1:]
                sink.write(block)
                await sink.drain()


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close a connection as the system of a process that was killed does."""
    # The socket may be closed already.
    with suppress(OSError):
        writer.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
        )
    writer.transport.abort()
