"""docker/entrypoint.sh and docker/make-secrets.sh, run by the shell that the images have."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

DOCKER = Path(__file__).parents[2] / "docker"
SECRET = "sk-4711-never-shown"


def run(folder: Path, *argv: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", str(DOCKER / "entrypoint.sh"), *argv],
        env=environment(folder, **variables),
        capture_output=True,
        text=True,
    )


def environment(folder: Path, **variables: str) -> dict[str, str]:
    places = {"QINGLAN_SECRETS": str(folder / "secrets"), "QINGLAN_KEYS": str(folder / "keys")}
    return {"PATH": os.environ["PATH"]} | places | variables


def put(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("place", ["secrets", "keys"])
def test_a_file_becomes_a_variable_without_its_line_end(tmp_path: Path, place: str) -> None:
    put(tmp_path, f"{place}/OPENAI_API_KEY", f"{SECRET}\n")
    done = run(tmp_path, "sh", "-c", 'printf "<%s>" "$OPENAI_API_KEY"')
    assert (done.returncode, done.stdout) == (0, f"<{SECRET}>")


def test_values_are_taken_as_they_are(tmp_path: Path) -> None:
    value = "a b$(id)`id`\"'\\;*%s"
    put(tmp_path, "secrets/ODD_VALUE", value)
    assert run(tmp_path, "printenv", "ODD_VALUE").stdout == value + "\n"


def test_files_in_small_letters_stay_files(tmp_path: Path) -> None:
    put(tmp_path, "secrets/s3.json", "{}")
    put(tmp_path, "secrets/valkey_password", "x")
    assert "valkey" not in run(tmp_path, "env").stdout


def test_a_file_elsewhere_is_named_by_two_underscores(tmp_path: Path) -> None:
    file = put(tmp_path, "elsewhere", SECRET)
    done = run(tmp_path, "printenv", "RAY_AUTH_TOKEN", RAY_AUTH_TOKEN__FILE=str(file), SSL_CERT_FILE=str(file))
    assert done.stdout == SECRET + "\n"
    assert "SSL_CERT=" not in run(tmp_path, "env", SSL_CERT_FILE=str(file)).stdout


def test_without_secrets_the_command_just_runs(tmp_path: Path) -> None:
    assert run(tmp_path, "echo", "two words", "here").stdout == "two words here\n"


@pytest.mark.parametrize(
    ("text", "said"), [("", "is empty"), ("\n", "is empty"), (f"{SECRET}\nsecond\n", "several lines")]
)
def test_a_file_that_is_no_secret_stops_the_start_in_one_line(tmp_path: Path, text: str, said: str) -> None:
    put(tmp_path, "secrets/OPENAI_API_KEY", text)
    done = run(tmp_path, "echo", "started")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (78, "", 1)
    assert said in done.stderr and "OPENAI_API_KEY" in done.stderr and SECRET not in done.stderr


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    done = run(tmp_path, "echo", "started", RAY_AUTH_TOKEN__FILE=str(tmp_path / "nowhere"))
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (78, "", 1)
    assert f"{tmp_path / 'nowhere'}: no file that this user can read" in done.stderr


def test_two_different_values_are_refused_and_not_shown(tmp_path: Path) -> None:
    put(tmp_path, "secrets/OPENAI_API_KEY", SECRET)
    done = run(tmp_path, "echo", "started", OPENAI_API_KEY="another")
    assert done.returncode == 78 and "remove one of them" in done.stderr
    assert SECRET not in done.stderr and "another" not in done.stderr
    assert run(tmp_path, "echo", "started", OPENAI_API_KEY=SECRET).stdout == "started\n"


def test_no_command_is_one_line(tmp_path: Path) -> None:
    assert run(tmp_path).stderr == "entrypoint: no command to run\n"


def test_the_command_takes_over_the_process_and_its_signals(tmp_path: Path) -> None:
    put(tmp_path, "secrets/OPENAI_API_KEY", SECRET)
    argv = ["sh", str(DOCKER / "entrypoint.sh"), "sleep", "60"]
    with subprocess.Popen(argv, env=environment(tmp_path)) as process:
        command_line, deadline = Path(f"/proc/{process.pid}/cmdline"), time.monotonic() + 60
        while command_line.read_bytes() != b"sleep\x0060\0" and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == -signal.SIGTERM


def make_secrets(folder: Path) -> str:
    argv = ["sh", str(DOCKER / "make-secrets.sh"), str(folder)]
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout


def test_secrets_are_random_and_only_their_folder_is_closed(tmp_path: Path) -> None:
    make_secrets(tmp_path / "a"), make_secrets(tmp_path / "b")
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o700
    files = [path for path in (tmp_path / "a").iterdir() if path.is_file()]
    assert len(files) == 14 and all(path.stat().st_mode & 0o777 == 0o444 for path in files)
    for path in files:
        text = path.read_text()
        assert text != (tmp_path / "b" / path.name).read_text(), path.name
        assert text.count("\n") == 0, f"{path.name}: kubectl's --from-file would take a line end as part of the value"
    assert len((tmp_path / "a" / "postgres_password").read_text()) == 48


def test_what_follows_from_a_secret_holds_it(tmp_path: Path) -> None:
    make_secrets(tmp_path)
    read = {path.name: path.read_text() for path in tmp_path.iterdir() if path.is_file()}
    assert read["ledger_url"] == f"postgresql+psycopg://ledger:{read['ledger_password']}@postgres:5432/ledger"
    assert read["docket_url"] == f"redis://:{read['valkey_password']}@valkey:6379/1"
    assert read["valkey.conf"] == f"requirepass {read['valkey_password']}"
    assert json.loads(read["s3.json"])["identities"][0]["credentials"] == [
        {"accessKey": read["s3_access_key"], "secretKey": read["s3_secret_key"]}
    ]


def test_a_second_time_nothing_changes(tmp_path: Path) -> None:
    assert len(make_secrets(tmp_path).splitlines()) == 14
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    assert make_secrets(tmp_path) == ""
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before
