"""A PostgreSQL server of a test's own, from Debian's packages or the PATH."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import sqlalchemy as sa

from qinglan.runs.processes import HOST, free_port

DEBIAN = Path("/usr/lib/postgresql")


@dataclass(frozen=True)
class PostgresServer:
    """A server that listens on a socket for its owner, on loopback for users with a password."""

    folder: str
    port: int
    binaries: Path

    @property
    def owners_url(self) -> str:
        """The superuser's address, without a password."""
        return f"postgresql+psycopg://qinglan@/postgres?host={self.folder}&port={self.port}"

    def make_database(self, name: str) -> str:
        """A database whose owner may do nothing else; its address without a driver's name."""
        password = f"secret-of-{name}"
        engine = sa.create_engine(self.owners_url, isolation_level="AUTOCOMMIT")
        with engine.connect() as db:
            db.execute(sa.text(f"CREATE ROLE {name} LOGIN PASSWORD '{password}'"))
            db.execute(sa.text(f"CREATE DATABASE {name} OWNER {name}"))
        engine.dispose()
        return f"{name}:{password}@{HOST}:{self.port}/{name}"


def newest_initdb() -> Path | None:
    """Debian's newest, or the one of the PATH."""
    of_debian = sorted(DEBIAN.glob("*/bin/initdb"))
    if of_debian:
        return of_debian[-1]
    of_path = shutil.which("initdb")
    return Path(of_path) if of_path else None


@contextmanager
def postgres_server() -> Iterator[PostgresServer]:
    """Start a server, and end it with the block; skips the test where there is none to start."""
    initdb = newest_initdb()
    if not initdb:
        pytest.skip("needs PostgreSQL's server (Debian: postgresql)")
    binaries = initdb.resolve().parent
    port = free_port()
    # PostgreSQL refuses to run as root.
    as_user: list[str] = []
    if os.geteuid() == 0:
        as_user = ["setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups"]
    # A socket's path must be short.
    with tempfile.TemporaryDirectory(prefix="pg", dir="/tmp") as folder:
        if as_user:
            shutil.chown(folder, "nobody", "nogroup")
        data = f"{folder}/data"
        run = {"check": True, "capture_output": True, "cwd": folder}
        make = [*as_user, binaries / "initdb", "-D", data, "-U", "qinglan", "-N", "-E", "UTF8"]
        subprocess.run([*make, "--auth-local=trust", "--auth-host=scram-sha-256"], **run)
        options = f"-k {folder} -p {port} -c listen_addresses={HOST} -c fsync=off"
        control = [*as_user, binaries / "pg_ctl", "-D", data, "-w", "-l", f"{folder}/log"]
        subprocess.run([*control, "-o", options, "start"], **run)
        try:
            yield PostgresServer(folder, port, binaries)
        finally:
            subprocess.run([*control, "-m", "immediate", "stop"], **run)
