"""The router as a process of its own: `python -m qinglan.serving.router --profile NAME --routes FILE`.

The first line on standard output is the address. It imports neither an engine nor Prefect nor MLflow.
"""

import argparse
import gc
import logging
import math
import socket
import sys
from pathlib import Path

import uvicorn

from qinglan.config import load_profile
from qinglan.errors import ConfigError, QinglanError
from qinglan.serving.canary_observer import canary_observer_of
from qinglan.serving.router_app import create_app

_BACKLOG = 2048
_KEEP_ALIVE_S = 75
_LAST_ANSWERS_S = 2
"""After the deadline of the last request that came in."""
_LOG = logging.getLogger(__name__)


def main() -> int:
    """Serve until SIGTERM or SIGINT; requests that came in before are answered."""
    options = _parse()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        profile = load_profile(options.profile, options.set)
        observer = None
        if options.watch:
            observer = canary_observer_of(profile, options.rag_url or profile.rag.url, options.watch)
        app = create_app(profile, options.routes, observer, restarted=options.restarted)
        listener = _listen(profile.serve.host, profile.serve.port if options.port is None else options.port)
    except QinglanError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    config = uvicorn.Config(
        app, log_config=None, log_level="warning", access_log=False, lifespan="on", server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=math.ceil(profile.serve.deadline_ms / 1000) + _LAST_ANSWERS_S,
    )  # fmt: skip
    # What is loaded by now stays: looking through it for garbage again and again would hold requests up.
    gc.collect()
    gc.freeze()
    host, port = listener.getsockname()[:2]
    sys.stdout.write(f"http://[{host}]:{port}\n" if ":" in host else f"http://{host}:{port}\n")
    sys.stdout.flush()
    uvicorn.Server(config).run(sockets=[listener])
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Question in, answer out: the champion behind OpenAI's protocol.")
    parser.add_argument("--profile", required=True, help="name or path")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a setting")
    parser.add_argument("--routes", required=True, type=Path, help="file that names the models in service")
    parser.add_argument("--port", type=int, help="instead of serve.port; 0 takes a free one")
    parser.add_argument("--watch", type=Path, metavar="FOLDER", help="watch canaries, and keep how they stand here")
    restarted = "go on without a request log where its folder is not there any more"
    parser.add_argument("--restarted", action="store_true", help=restarted)
    parser.add_argument("--rag-url", help="instead of rag.url, which both models' rewrites are put to")
    return parser.parse_args()


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # With the protocol's number asyncio switches Nagle's algorithm off, which costs 40 ms a request.
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"serve.host {host}, port {port}: {error.strerror}; choose another with serve.port"
        ) from error
    return listener


if __name__ == "__main__":
    sys.exit(main())
