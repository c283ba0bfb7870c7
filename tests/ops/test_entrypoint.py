"""docker/entrypoint.sh and docker/make-secrets.sh, run by the shell that the images have."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from waiting import wait_until

DOCKER = Path(__file__).parents[2] / "docker"
SECRET, ODD = "sk-4711-never-shown", "a b$(id)`id`\"'\\;*%s"


def run(folder: Path, *argv: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = ["sh", str(DOCKER / "entrypoint.sh"), *argv]
    return subprocess.run(
        command, env=environment(folder, **variables), capture_output=True, text=True
    )


def environment(folder: Path, **variables: str) -> dict[str, str]:
    places = {"QINGLAN_SECRETS": str(folder / "secrets"), "QINGLAN_KEYS": str(folder / "keys")}
    return {"PATH": os.environ["PATH"]} | places | variables


def put(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("file", "text", "value"),
    [
        ("secrets/OPENAI_API_KEY", f"{SECRET}\n", SECRET),
        ("keys/OPENAI_API_KEY", ODD, ODD),
        ("secrets/openai_api_key", SECRET, ""),  # in small letters it stays a file
    ],
)
def test_a_file_becomes_a_variable_without_its_line_end(
    tmp_path: Path, file: str, text: str, value: str
) -> None:
    put(tmp_path, file, text)
    done = run(tmp_path, "sh", "-c", 'printf "%s" "$OPENAI_API_KEY"')
    assert (done.returncode, done.stdout) == (0, value)


def test_without_secrets_with_the_same_value_twice_or_with_a_file_elsewhere_the_command_runs(
    tmp_path: Path,
) -> None:
    assert run(tmp_path, "echo", "two words", "here").stdout == "two words here\n"
    put(tmp_path, "secrets/OPENAI_API_KEY", SECRET)
    assert run(tmp_path, "echo", "started", OPENAI_API_KEY=SECRET).stdout == "started\n"
    assert run(tmp_path).stderr == "entrypoint: no command to run\n"
    file = str(put(tmp_path, "elsewhere", SECRET))
    said = run(tmp_path, "env", RAY_AUTH_TOKEN__FILE=file, SSL_CERT_FILE=file).stdout.splitlines()
    assert f"RAY_AUTH_TOKEN={SECRET}" in said, "it is named by two underscores"
    assert not [line for line in said if line.startswith("SSL_CERT=")]


@pytest.mark.parametrize(
    ("text", "variables", "said"),
    [
        ("", {}, "is empty"),
        (f"{SECRET}\nsecond\n", {}, "several lines"),
        (SECRET, {"OPENAI_API_KEY": "another"}, "remove one of them"),
        (SECRET, {"OPENAI_API_KEY__FILE": "/nowhere"}, "/nowhere: no file that this user can read"),
    ],
)
def test_what_is_no_secret_is_not_shown(
    tmp_path: Path, text: str, variables: dict[str, str], said: str
) -> None:
    put(tmp_path, "secrets/OPENAI_API_KEY", text)
    done = run(tmp_path, "echo", "started", **variables)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (78, "", 1)
    assert said in done.stderr
    assert "OPENAI_API_KEY" in done.stderr
    assert SECRET not in done.stderr
    assert "another" not in done.stderr


def test_the_command_takes_over_the_process_and_its_signals(tmp_path: Path) -> None:
    put(tmp_path, "secrets/OPENAI_API_KEY", SECRET)
    argv = ["sh", str(DOCKER / "entrypoint.sh"), "sleep", "60"]
    with subprocess.Popen(argv, env=environment(tmp_path)) as process:
        command_line = Path(f"/proc/{process.pid}/cmdline")
        wait_until(
            "the command", lambda: command_line.read_bytes() == b"sleep\x0060\0", look_every_s=0.01
        )
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == -signal.SIGTERM


def make_secrets(folder: Path) -> str:
    argv = ["sh", str(DOCKER / "make-secrets.sh"), str(folder)]
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir() if path.is_file()}


def test_secrets_are_random_and_a_second_time_nothing_changes(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    make_secrets(folder), make_secrets(tmp_path / "b")
    made, others = contents(folder), contents(tmp_path / "b")
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {(folder / name).stat().st_mode & 0o777 for name in made} == {0o444}
    assert not made.items() & others.items()
    assert not any("\n" in text for text in made.values()), (
        "kubectl's --from-file would make it a part of the value"
    )
    assert len(made["postgres_password"]) == 48
    assert (
        made["ledger_url"]
        == f"postgresql+psycopg://ledger:{made['ledger_password']}@postgres:5432/ledger"
    )
    keys = {"accessKey": made["s3_access_key"], "secretKey": made["s3_secret_key"]}
    assert json.loads(made["s3.json"])["identities"][0]["credentials"] == [keys]
    assert (make_secrets(folder), contents(folder)) == ("", made)
