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
"""Before each block of a slow connection."""
_DRIP_S = 0.5
"""Before each byte of an answer whose headers come slowly."""
_LEFT_BYTES = 150
"""Of an answer that is cut off: the status line and some headers."""


class Proxy:
    """Listens on a port of its own. `mode` is one of pass, down, black hole, slow, slow headers and
    cut body."""

    def __init__(self, host_and_port: tuple[str, int]) -> None:
        self._target, self.mode = host_and_port, "pass"
        self._loop = asyncio.new_event_loop()
        self._clients = set[asyncio.StreamWriter]()
        self._lets_through = asyncio.Event()
        self._lets_through.set()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self.port = 0
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
        before, self.mode = self.mode, mode
        self._lets_through.clear() if mode == "black hole" else self._lets_through.set()
        if mode == "down":
            self._server.close()
            for client in tuple(self._clients):
                _reset(client)
        elif before == "down":
            await self._listen()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there_reader, there = await asyncio.open_connection(*self._target)
        except OSError:
            _reset(writer)
            return
        self._clients.add(writer)
        try:
            ways = (
                self._pump(reader, there, answers=False),
                self._pump(there_reader, writer, answers=True),
            )
            await asyncio.gather(*ways, return_exceptions=True)
        finally:
            self._clients.discard(writer)
            for each in (there, writer):
                each.close()

    async def _pump(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, answers: bool
    ) -> None:
        with closing(sink):
            while block := await source.read(_BLOCK_BYTES):
                await self._lets_through.wait()
                if self.mode == "slow":
                    await asyncio.sleep(_SLOW_S)
                if answers and self.mode == "cut body":
                    sink.write(block[:_LEFT_BYTES])
                    await sink.drain()
                    break
                while answers and self.mode == "slow headers" and block:
                    sink.write(block[:1])
                    await asyncio.sleep(_DRIP_S)
                    block = block[1:]
                sink.write(block)
                await sink.drain()


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close it as the system of a process that was killed does."""
    with suppress(OSError):  # it may be closed already
        writer.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
        )
    writer.transport.abort()
