"""The request log: consent, redaction, a file a day that reads as a workbook, and bad disks."""

import fcntl
import json
import threading
import time
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fake_service import completion
from fixture_types import ProfileOf
from starlette.testclient import TestClient
from waiting import wait_until

from qinglan.config import Profile
from qinglan.data.forgotten import Tombstones
from qinglan.data.sources.files import list_files
from qinglan.data.workbook import read_rows
from qinglan.errors import ConfigError
from qinglan.recipes import get_recipe
from qinglan.rows import Row, row_id
from qinglan.serving import day_file, request_log
from qinglan.serving.day_file import DayFile, finish_leftovers
from qinglan.serving.redaction import redact
from qinglan.serving.request_handler import ServedAnswer
from qinglan.serving.request_log import RequestLogWriter
from qinglan.serving.router import create_app
from qinglan.serving.routes import Backend, Routes

TODAY = date(2026, 11, 21)
TOMORROW = date(2026, 11, 22)
wait_for = partial(wait_until, look_every_s=0.01)


@pytest.fixture
def profile(profile_of: ProfileOf, tmp_path: Path) -> ProfileOf:
    def make(**settings: Any) -> Profile:
        log = {"folder": str(tmp_path / "log"), "consent": "all"} | settings
        return profile_of(serve={"request_log": log})

    return make


def question(query: str, profile: str = "", history: str = "") -> Row:
    identity = row_id("default", query, profile, history)
    return Row(
        id=identity,
        tenant="default",
        query=query,
        profile=profile,
        history=history,
        source="router",
    )


def put(log: RequestLogWriter, row: Row, rewrite: str = "益生菌 时间") -> None:
    log.put(ServedAnswer(1795219200.0, "champion", "7", "model", "", 3.0, row.id, rewrite), row)


def folder_of(settings: Profile) -> Path:
    return Path(settings.serve.request_log.folder or "")


def open_log(settings: Profile, today: date = TODAY) -> RequestLogWriter:
    return RequestLogWriter(folder_of(settings), settings, lambda: today)


def write(
    settings: Profile, *rows: Row, today: date = TODAY, rewrite: str = "益生菌 时间"
) -> RequestLogWriter:
    log = open_log(settings, today)
    for row in rows:
        put(log, row, rewrite)
    log.close()
    return log


def names(settings: Profile) -> list[str]:
    return sorted(path.name for path in folder_of(settings).iterdir())


def test_the_folder_reads_as_a_workbook_with_what_was_answered(profile):
    settings = profile()
    rows = [question("菌粉睡前吃行不行", "孕妇", "问过钙片"), question('"引号"，\n换行')]
    write(settings, *rows)
    logged = list(read_rows(folder_of(settings), settings.data, settings.tenant))
    expected = [(row.id, row.query, row.profile, row.history, "ok") for row in rows]
    assert [(row.id, row.query, row.profile, row.history, row.status) for row in logged] == expected
    [path] = folder_of(settings).iterdir()
    assert path.name == "2026-11-21.jsonl"
    assert logged[0].source == "2026-11-21.jsonl:1"
    assert path.stat().st_mode & 0o777 == 0o600
    assert json.loads(path.read_text().splitlines()[0])["qinglan"] == {
        "row_id": rows[0].id,
        "origin": "",
        "at": "2026-11-21T00:00:00+00:00",
        "role": "champion",
        "version": "7",
        "source": "model",
        "reason": "",
        "answer": "益生菌 时间",
    }


def test_a_forgotten_question_is_not_taken(profile):
    settings = profile()
    forgotten = question("菌粉睡前吃行不行", "孕妇")
    Tombstones().adding(rows=[forgotten.id]).write(settings.paths.state)
    log = write(settings, forgotten, question("钙片能嚼吗"))
    assert log.outcomes == {"forgotten": 1, "written": 1}
    assert forgotten.query not in (folder_of(settings) / "2026-11-21.jsonl").read_text()


@pytest.mark.parametrize(("redacted", "phone"), [(True, "[手机号]"), (False, "13812345678")])
def test_personal_numbers_reach_no_file(
    profile_of: ProfileOf, tmp_path: Path, redacted: bool, phone: str
):
    recipe = str(Path(__file__).parents[1] / "support" / "capitals_recipe.py")
    log = {"folder": str(tmp_path / "log"), "consent": "all", "redact": redacted}
    columns = {"query": "用户提问", "inputs": {"hint": "线索"}}
    settings = profile_of(recipe=recipe, serve={"request_log": log}, data={"columns": columns})
    row = question("我是13812345678", "电话13812345678", "13812345678")
    row = row.with_inputs({"hint": "电话13812345678"})
    write(settings, row, rewrite="13812345678 能吃")
    inputs = get_recipe(recipe).INPUTS
    (logged,) = read_rows(folder_of(settings), settings.data, settings.tenant, inputs=inputs)
    assert (logged.query, logged.profile, logged.history) == (f"我是{phone}", f"电话{phone}", phone)
    assert logged.inputs == {"hint": f"电话{phone}"}
    content = (tmp_path / "log" / "2026-11-21.jsonl").read_text()
    assert ("13812345678" in content) == (not redacted)


def test_a_question_stands_there_once_a_day(profile):
    settings = profile()
    first = write(
        settings, *map(question, ("能吃吗，我是13812345678", "能吃吗，我是13912345678", "别的问题"))
    )
    assert first.outcomes == {"written": 2, "duplicate": 1}
    second = write(settings, question("别的问题"), question("又一个"))
    assert second.outcomes == {"written": 1, "duplicate": 1}
    third = write(settings, question("别的问题"), today=TOMORROW)
    assert third.outcomes == {"written": 1}
    assert names(settings) == ["2026-11-21.2.jsonl", "2026-11-21.jsonl", "2026-11-22.jsonl"]


def test_todays_file_is_not_there_to_read(profile, monkeypatch):
    monkeypatch.setattr(request_log, "_TICK_S", 0.01)
    settings = profile()
    folder = folder_of(settings)
    day = [TODAY]
    log = RequestLogWriter(folder, settings, lambda: day[0])
    put(log, question("菌粉睡前吃行不行"))
    wait_for("a line", lambda: log.outcomes["written"])
    assert names(settings) == ["2026-11-21.jsonl.partial"]
    # Somebody tidies up.
    (folder / "2026-11-21.jsonl.partial").unlink()
    put(log, question("另一个问题"))
    wait_for("a line", lambda: log.outcomes["written"] == 2)
    # The day ends even if nothing is asked.
    day[0] = TOMORROW
    wait_for("the day's end", lambda: names(settings) == ["2026-11-21.jsonl"])
    assert len(list_files(folder).read) == 1
    log.close()
    assert names(settings) == ["2026-11-21.jsonl"]


def test_what_a_killed_router_left_is_finished_a_running_ones_file_is_left_to_it_and_old_ones_go(
    profile,
):
    settings = profile(keep_days=2)
    folder = folder_of(settings)
    folder.mkdir()
    half = '{"问题": "半'
    (folder / "2026-11-20.jsonl.partial").write_text('{"问题": "昨天的问题"}\n' + half)
    (folder / "2026-11-19.2.jsonl.partial").write_text(half)
    for name in (
        "2026-11-18.jsonl",
        "2026-11-18.3.jsonl",
        "2026-11-19.jsonl",
        "mine.jsonl",
        "2026-11-18.xlsx",
    ):
        (folder / name).write_text("x\n")
    with (folder / "2026-11-21.jsonl.partial").open("w") as file_of_running_router:
        fcntl.flock(file_of_running_router, fcntl.LOCK_EX)
        file_of_running_router.write(half)
        file_of_running_router.flush()
        write(settings, question("我的问题"))
    assert names(settings) == [
        "2026-11-18.xlsx",
        "2026-11-19.jsonl",
        "2026-11-20.jsonl",
        "2026-11-21.2.jsonl",
        "2026-11-21.jsonl.partial",
        "mine.jsonl",
    ]
    assert (folder / "2026-11-20.jsonl").read_text() == '{"问题": "昨天的问题"}\n'


def test_what_reading_would_refuse_or_more_than_a_day_takes_is_not_written(profile, monkeypatch):
    settings = profile()
    log = write(settings, question("长" * 501), question("？！"), question("问", "长" * 2001))
    assert log.outcomes == {"unusable": 3}
    data = settings.data.model_copy(update={"max_context_chars": 5000})
    longer = settings.model_copy(update={"data": data})
    log = write(longer, question("问", "长" * 4001))
    assert log.outcomes == {"unusable": 1}, "a part would be another question"
    assert names(settings) == []
    monkeypatch.setattr(day_file, "MOST_A_DAY", 2)
    log = write(profile(), *(question(f"问题{number}") for number in range(5)))
    assert log.outcomes == {"written": 2, "day_full": 3}


def test_a_full_queue_loses_lines_not_time(profile, monkeypatch):
    monkeypatch.setattr(request_log, "_MOST_WAITING", 2)
    released = threading.Event()
    monkeypatch.setattr(DayFile, "add", lambda *_: released.wait(60) and "written")
    settings = profile()
    log = open_log(settings)
    for number in range(10):
        put(log, question(f"问题{number}"))
    lost = log.outcomes["queue_full"]
    released.set()
    log.close()
    assert lost >= 7
    assert log.outcomes["written"] == 10 - lost


def test_half_a_line_is_taken_back(tmp_path, monkeypatch):
    day = DayFile(tmp_path, TODAY)
    day.add("0" * 16, {"问题": "一"})
    write_file = day_file.os.write
    monkeypatch.setattr(day_file.os, "write", lambda file, line: write_file(file, line[:5]))
    with pytest.raises(OSError, match="No space left"):
        day.add("1" * 16, {"问题": "二"})
    monkeypatch.undo()
    day.add("1" * 16, {"问题": "二"})
    day.finish()
    lines = (tmp_path / "2026-11-21.jsonl").read_text().splitlines()
    assert [json.loads(line)["问题"] for line in lines] == ["一", "二"]


def test_a_file_that_is_finished_between_two_looks_is_not_replaced(tmp_path, monkeypatch):
    flock = fcntl.flock
    final = tmp_path / "2026-11-21.jsonl"

    def ends_meanwhile(file: int, operation: int) -> None:
        flock(file, operation)
        if not final.exists():
            final.write_text('{"问题": "一"}\n')

    day = DayFile(tmp_path, TODAY)
    monkeypatch.setattr(day_file.fcntl, "flock", ends_meanwhile)
    day.add("1" * 16, {"问题": "二"})
    day.finish()
    assert final.read_text() == '{"问题": "一"}\n'
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "2026-11-21.2.jsonl",
        "2026-11-21.jsonl",
    ]


def test_a_folder_that_can_not_be_made_stops_the_start_but_not_a_restart(profile, tmp_path):
    (tmp_path / "file").write_text("")
    settings = profile(folder=str(tmp_path / "file" / "log"))
    with pytest.raises(
        ConfigError, match=r"serve\.request_log\.folder: .*can't be used: Not a directory"
    ):
        open_log(settings)
    log = RequestLogWriter(folder_of(settings), settings, lambda: TODAY, must_work=False)
    put(log, question("一"))
    wait_for("a failure", lambda: log.outcomes["failed"])
    assert log.is_failing
    (tmp_path / "file").unlink()
    put(log, question("二"))
    log.close()
    assert log.outcomes == {"failed": 1, "written": 1}
    assert not log.is_failing


def test_a_leftover_that_another_process_finished_is_none(tmp_path, monkeypatch):
    (tmp_path / "2026-11-20.jsonl.partial").write_text("{}\n")
    monkeypatch.setattr(
        day_file.fcntl, "flock", lambda *_: (tmp_path / "2026-11-20.jsonl.partial").unlink()
    )
    finish_leftovers(tmp_path)


@pytest.mark.parametrize(
    ("settings", "header", "logged_questions"),
    [
        ({"consent": "all"}, None, 1),
        ({"consent": "none"}, "yes", 0),
        ({"consent": "header"}, " YES", 1),
        ({"consent": "header"}, "no", 0),
        ({"consent": "header"}, None, 0),
        ({"folder": None}, "yes", 0),
    ],
)
def test_only_who_agreed_is_kept(
    profile, serve, tmp_path, caplog, capfd, settings, header, logged_questions
):
    caplog.set_level("DEBUG")
    model = serve(lambda _: (200, completion("益生菌 时间")))
    routes = tmp_path / "routes.json"
    Routes(champion=Backend(url=model.url, model="m", version="7")).write(routes)
    with TestClient(create_app(profile(**settings), routes), "http://localhost") as client:
        body = {"messages": [{"role": "user", "content": "菌粉睡前吃行不行"}]}
        headers = {"x-log-consent": header} if header else {}
        assert client.post("/v1/chat/completions", json=body, headers=headers).status_code == 200
        page = client.get("/metrics").text
    files = [path.read_text() for path in tmp_path.rglob("*") if path.is_file()]
    assert sum("菌粉" in text for text in files) == logged_questions
    assert "菌粉" not in caplog.text + page + "".join(capfd.readouterr())


def test_clients_have_their_own_consent_and_quota_and_are_named_as_origins(
    profile_of, tmp_path, monkeypatch
):
    for name in ("own", "app", "other"):
        monkeypatch.setenv(name.upper(), f"{name}-secret")
    keys = {
        "app": {"key_env": "APP", "consent": "all", "logged_per_day": 2},
        "other": {"key_env": "OTHER"},
    }
    log = {"folder": str(tmp_path / "log"), "consent": "header"}
    settings = profile_of(serve={"request_log": log, "api_key_env": "OWN", "api_keys": keys})
    questions = [("app", "一"), ("app", "二"), ("app", "三"), ("other", "四"), ("own", "五")]
    # A restart keeps what was counted.
    for _ in range(2):
        with TestClient(create_app(settings, tmp_path / "routes.json")) as client:
            for name, text in questions:
                headers = {
                    "authorization": f"Bearer {name}-secret",
                    "x-log-consent": "yes" if name == "own" else "no",
                }
                body = {"messages": [{"role": "user", "content": text}]}
                answer = client.post("/v1/chat/completions", json=body, headers=headers)
                assert answer.status_code == 200
    logged: list[dict[str, Any]] = []
    for path in (tmp_path / "log").iterdir():
        logged += [json.loads(line) for line in path.read_text().splitlines()]
    origins = {record["问题"]: record["qinglan"]["origin"] for record in logged}
    assert origins == {"一": "app", "二": "app", "五": "default"}
    assert len(logged) == 3
    assert "secret" not in json.dumps(logged)
    monkeypatch.setenv("APP", "own-secret")
    with pytest.raises(ConfigError, match=r"serve\.api_keys\.app: has the same key as default"):
        create_app(settings, tmp_path / "routes.json")


IDENTITY = "11010519491231002X"  # the example in GB 11643
CARD = "4111111111111111"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("我的手机是13812345678，能吃吗", "我的手机是[手机号]，能吃吗"),
        ("打138 1234 5678", "打[手机号]"),
        ("打138-1234-5678或者+86 19912345678", "打[手机号]或者[手机号]"),
        ("打１３８１２３４５６７８。", "打[手机号]。"),
        ("打138\u200b1234\u200b5678。", "打[手机号]。"),
        ("微信wx13812345678", "微信wx[手机号]"),
        ("8613812345678;86-138 1234 5678;138·1234·5678;138_1234_5678", ";".join(["[手机号]"] * 4)),
        ("138.1234.5678;138/1234/5678;138 123 45678;（138）12345678", ";".join(["[手机号]"] * 4)),
        ("+86(138)12345678;138\t1234\t5678;138\r\n1234\r\n5678", ";".join(["[手机号]"] * 3)),
        (f"身份证{IDENTITY.lower()}，孕妇", "身份证[身份证号]，孕妇"),
        ("身份证１１０１０５１９４９１２３１００２Ｘ好", "身份证[身份证号]好"),
        ("卡号4111 1111 1111 1111扣钱", "卡号[银行卡号]扣钱"),
        ("卡号６２２２－０２１２－３４５６－７８９４", "卡号[银行卡号]"),
        ("写信到li.lei+a@mail.example.com.cn吧", "写信到[邮箱]吧"),
        ("写信到ｌｉ＠ｑｑ．ｃｏｍ吧", "写信到[邮箱]吧"),
        ("打（０１０）６２７５１２３４", "打[座机号]"),
        ("打0755 8888 6666转8001", "打[座机号]转8001"),
        ("打+86-21-62751234", "打[座机号]"),
        ("打+86 021-6275 1234", "打[座机号]"),
        (
            f"我叫李雷，{IDENTITY}，13812345678，li@qq.com，{CARD}，010-62751234",
            "我叫李雷，[身份证号]，[手机号]，[邮箱]，[银行卡号]，[座机号]",
        ),
    ],
)
def test_numbers_of_people_are_replaced(text, expected):
    assert redact(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "每天吃2000毫克，连吃30天，行吗？",
        "批号20261121，国药准字Z20050228",
        "订单号202611210000012345",
        "12812345678 和 138123456789 不是手机号",
        "110105194912310021",  # check digit wrong
        "11010519491331002X",  # no such month
        "4111111111111112",  # no card by Luhn
        "温度是36.5，血压120/80，体重65.5",
        "比例1:2:3，2026-11-21，10:30",
        "3000/4000/5000单位，150/2000/300毫克，192.168.1.10，2026.11.21 13:00，"
        "订单8612812345678、98613812345678",
        "@所有人",
        "",
        "Ａ１２３全角也原样",
    ],
)
def test_other_numbers_stay(text):
    assert redact(text) == text


@pytest.mark.parametrize(
    "text", ["a" * 4000 + "@", "1 " * 2000, "1-" * 2000, "a.@" * 1300, "0" * 4000]
)
def test_nobody_can_make_it_slow(text):
    start = time.process_time()
    redact(text)
    assert time.process_time() - start < 0.5
