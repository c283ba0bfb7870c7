"""Connections whose clients send nothing, send too little, or don't read."""

import asyncio
import resource
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import uvicorn
from starlette.responses import PlainTextResponse
from uvicorn.server import ServerState

from qinglan.config import Serve
from qinglan.errors import ConfigError
from qinglan.serving import connections
from qinglan.serving.connections import ClientConnection, Connections, backlog_for

Client = tuple[asyncio.StreamReader, asyncio.StreamWriter]
GET = b"GET /%s HTTP/1.1\r\nhost: x\r\n\r\n"
CUT = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{"


@pytest.fixture
async def connect() -> AsyncIterator[Callable[[bytes], Awaitable[Client]]]:
    """Clients of a server that has three connections, and takes a minute for `/slow`."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        path = scope["path"]
        await asyncio.sleep(60 if path == "/slow" else 0)
        if scope["method"] == "POST":
            for _ in range(2):
                await receive()
        length = 50_000_000 if path == "/long" else 1
        await PlainTextResponse("x" * length)(scope, receive, send)

    config = uvicorn.Config(app, lifespan="off", log_config=None)
    state = ServerState()
    make = partial(
        ClientConnection, Connections(3), config=config, server_state=state, app_state={}
    )
    server = await asyncio.get_running_loop().create_server(make, "127.0.0.1", 0)
    clients: list[Client] = []

    async def open_one(sent: bytes) -> Client:
        clients.append(await asyncio.open_connection(*server.sockets[0].getsockname()))
        clients[-1][1].write(sent)
        await asyncio.sleep(0.05)
        return clients[-1]

    yield open_one
    server.close()
    for task in state.tasks:
        task.cancel()
    for _, writer in clients:
        writer.close()


async def is_open(client: Client) -> bool:
    with suppress(ConnectionError):
        while True:
            try:
                if not await asyncio.wait_for(client[0].read(1 << 16), 0.02):
                    break
            except TimeoutError:
                return True
    return False


@pytest.mark.parametrize("idle", [b"", GET[:20], CUT, GET % b"", GET % b"long"])
async def test_who_waits_longest_for_its_client_gives_way_and_who_is_being_answered_does_not(
    connect, idle
):
    being_answered = await connect(GET % b"slow")
    first_idle = await connect(idle)
    second_idle = await connect(idle)
    new = await connect(GET % b"")
    assert b"200 OK" in await new[0].readline()
    # To look whether the client of a long answer is connected is to read, which lets it go on.
    if b"long" not in idle:
        clients = (being_answered, first_idle, second_idle, new)
        assert [await is_open(client) for client in clients] == [True, False, True, True]
    all_being_answered = [await connect(GET % b"slow") for _ in range(3)]
    assert not await is_open(all_being_answered[-1]), (
        "where all are being answered, the new one is closed"
    )


@pytest.mark.parametrize("before", [b"", GET % b""])
async def test_a_head_that_does_not_come_to_its_end_is_given_up(connect, monkeypatch, before):
    monkeypatch.setattr(connections, "HEAD_WITHIN_S", 0.3)
    dripping = await connect(before + GET[:20])
    answered = await connect(GET % b"")
    for _ in range(20):
        dripping[1].write(b"x")
        await asyncio.sleep(0.03)
    assert not await is_open(dripping)
    assert await is_open(answered)


def test_the_files_that_it_may_open_are_as_many_as_it_needs(monkeypatch):
    limits = [(100, 1000)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[0])
    monkeypatch.setattr(resource, "setrlimit", lambda _, limit: limits.insert(0, limit))
    assert backlog_for(Serve()) == 168
    assert limits[0] == (1000, 1000)
    with pytest.raises(
        ConfigError,
        match=r"max_connections 5000: needs 5384 open files, .* may have 1000; lower it",
    ):
        backlog_for(Serve(max_connections=5000))
