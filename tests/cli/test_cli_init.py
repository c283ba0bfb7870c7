"""`qinglan init`: what it writes loads and can be run, whatever the workbook's header holds; a
mistake is one line."""

import io
from pathlib import Path
from typing import Any

import pytest
import yaml
from fixture_types import Qinglan, Serve

from qinglan.config import Columns, load_profile

URL = "https://api.example.com/v1"
REAL = ("--teacher", "gpt-5", "--teacher-url", URL, "--teacher-key-env", "BIG_KEY")
NASTY = "问: {题} #1\n- [x]: &a *b '\" !!python/object:os.system"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write("q.csv", "Question,画像,备注")
    return tmp_path


def write(name: str, header: str) -> None:
    rows = [
        f"{text},,{number}"
        for number, text in enumerate(("鱼油一天吃几粒", "钙片什么时候吃", "益生菌怎么存放"))
    ]
    Path(name).write_text("\n".join([header, *rows]), encoding="utf-8")


def honest(body: dict[str, Any]) -> tuple[int, Any]:
    text = body.get("rewritten_query") or body["query"]
    passages = [
        {"id": f"{text}{n}", "content": f"{text}{n}", "reranker_score": 0.9 - n / 10}
        for n in range(3)
    ]
    return 200, {"data": {"recall": passages}}


@pytest.fixture
def init(qinglan: Qinglan) -> Qinglan:
    def call(*words: str, rag: str = "embedded") -> tuple[int, str, str]:
        options = ("--workbook", "q.csv", "--rag-url", rag, "--judge", "embedded", "--no-doctor")
        return qinglan("init", *words[:1], *options, *words[1:])

    return call


def test_the_profile_loads_holds_only_what_differs_and_can_be_run(
    init: Qinglan, qinglan: Qinglan, serve: Serve
):
    options = ("--teacher", "embedded", "--column", "问题=Question")
    status, out, err = init("test-acme", *options, "--yes", rag=serve(honest).url)
    text = Path("configs/test-acme.yaml").read_text(encoding="utf-8")
    assert (status, err) == (0, "")
    assert "`rewritten_query` is honoured" in out
    assert out.count("  qinglan run ") == 3
    assert out.endswith("services: qinglan doctor --profile test-acme --flow refresh\n")
    assert len(text.splitlines()) <= 40
    profile = load_profile("test-acme")
    assert (profile.name, profile.tenant.id) == ("test-acme", "test-acme")
    assert profile.data.columns == Columns(query="Question", profile="画像")
    assert {"simulated-rewriter", "simulated-judge", profile.student.name} <= profile.prices.keys()
    assert qinglan("run", "refresh", "--dry-run", "--profile", "test-acme")[0] == 0


def test_the_rags_preset_is_found_out(init: Qinglan, serve: Serve):
    def answer(body: dict[str, Any]) -> tuple[int, Any]:
        if "question" not in body:
            return 200, {"code": 101}
        chunk = {"similarity": 0.9, "content": "正文", "document_id": "d"}
        return 200, {"data": {"chunks": [chunk]}}

    ragflow = serve(answer)
    assert init("test-acme", "--yes", rag=ragflow.url)[0] == 0
    assert load_profile("test-acme").rag.preset == "ragflow"
    assert init("other", "--yes", "--rag-preset", "dfy", rag=ragflow.url)[0] == 2


@pytest.mark.parametrize("price", [(), ("--student-price", "0.1,0.2")])
@pytest.mark.parametrize("machine", ["cpu", "gpu1", "gpu2", "gpu4", "gpu8"])
@pytest.mark.parametrize("teacher", [(), (*REAL, "--teacher-price", "1.25,10")])
def test_the_costs_of_teacher_and_student_are_known_on_every_machine(
    init: Qinglan, machine: str, teacher: tuple[str, ...], price: tuple[str, ...]
):
    assert init("test-acme", "--yes", "--machine", machine, *price, *teacher)[0] == 0
    profile = load_profile("test-acme")
    student_price = profile.prices.get(profile.student.name)
    if price:
        assert student_price.output_per_million_usd == 0.2
    else:
        assert student_price or profile.student.gpu_hour_usd
    assert profile.teacher.model in profile.prices
    assert profile.teacher.api_key_env == ("BIG_KEY" if teacher else None)
    assert profile.gate.max_latency_ratio == (1.0 if teacher else None)
    assert profile.data.columns == Columns(query="Question", profile="画像")
    assert len(Path("configs/test-acme.yaml").read_text().splitlines()) <= 40


def test_a_header_is_data_in_the_file(init: Qinglan):
    quoted = NASTY.replace('"', '""')
    write("q.csv", f'"{quoted}",画像,备注')
    assert init("test-acme", "--column", f"问题={NASTY}", "--domain", "a: b\n#", "--yes")[0] == 0
    profile = load_profile("test-acme")
    assert (profile.data.columns.query, profile.tenant.domain) == (NASTY, "a: b\n#")
    assert yaml.safe_load(Path("configs/test-acme.yaml").read_text())["extends"] == "embedded"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["../test-acme"], "profile name '../test-acme': use letters, digits, _ and -"),
        (["embedded"], "configs/embedded.yaml: there is a profile of this name already"),
        (["test-acme", "--workbook", "no.csv"], "no.csv: no such file"),
        (
            ["test-acme", "--column", "问题=Questoin"],
            "no column 'Questoin'; its header has Question, 画像, 备注; nearest: Q",
        ),
        (
            ["test-acme", "--column", "题=Question"],
            "write FIELD=HEADER, FIELD being one of 问题, 用户画像",
        ),
        (
            ["test-acme", *REAL],
            "--teacher-price is missing (price of gpt-5 in US dollars per million tokens",
        ),
        (
            ["test-acme", *REAL, "--teacher-price", "1"],
            "--teacher-price '1': write IN,OUT in US dollars",
        ),
        (["test-acme", "--teacher", "gpt-5"], "--teacher-url is missing"),
        (
            ["test-acme", "--machine", "gpu2", "--student-price", "1"],
            "--student-price '1': write IN,OUT in US dollars",
        ),
        (
            ["test-acme", "--machine", "tpu"],
            "--machine 'tpu': take one of cpu, gpu1, gpu2, gpu4, gpu8",
        ),
        (
            ["test-acme", *REAL, "--teacher-key-env", "sk-1", "--teacher-price", "1,2"],
            "write the name of an env",
        ),
    ],
)
def test_a_mistake_is_one_line_and_writes_nothing(init: Qinglan, words: list[str], message: str):
    status, _, err = init(*words, "--yes")
    assert (status, err.count("\n")) == (2, 1)
    assert message in err
    assert "sk-1" not in err
    assert not Path("configs").exists()


def test_a_rag_that_does_not_answer_is_a_warning_and_an_existing_file_stays(init: Qinglan):
    status, out, _ = init("test-acme", "--yes", rag="http://127.0.0.1:9/q")
    assert status == 0
    assert "warning: rag.url can't be reached" in out
    assert load_profile("test-acme").rag.url == "http://127.0.0.1:9/q"
    before = Path("configs/test-acme.yaml").read_bytes()
    assert (
        "there is a profile of this name already" in init("test-acme", "--yes", "--domain", "x")[2]
    )
    assert Path("configs/test-acme.yaml").read_bytes() == before


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_without_a_known_column_the_headers_are_named_and_a_terminal_is_asked_for_the_rest(
    init: Qinglan, qinglan: Qinglan, monkeypatch: pytest.MonkeyPatch
):
    write("q.csv", "甲,乙,丙")
    assert (
        "Its header has 甲, 乙, 丙; say it with --column 问题=HEADER"
        in init("test-acme", "--yes")[2]
    )
    monkeypatch.setenv("BIG_KEY", "sk-secret")
    answers = ["q.csv", "甲", "", "embedded", "", "gpt-5", URL, "BIG_KEY", "", "", "1.25,10"]
    monkeypatch.setattr("sys.stdin", Terminal("\n".join(answers) + "\n"))
    status, out, _ = qinglan("init", "test-acme", "--no-doctor")
    assert status == 0
    assert "BIG_KEY: is set" in out
    assert "sk-secret" not in out
    profile = load_profile("test-acme")
    assert (profile.data.columns.query, profile.teacher.model) == ("甲", "gpt-5")
    assert profile.judge.model == "simulated-judge"
    assert profile.prices["gpt-5"].output_per_million_usd == 10


@pytest.mark.parametrize(
    ("header", "answers", "query", "gold"),
    [
        ("咨询内容,文档,备注", "\n\n", "咨询内容", "文档"),
        ("备注,标准文档,问题描述", "\n-\n", "问题描述", ""),
        ("甲,文档,问题", "甲\n文档\n", "甲", "文档"),
    ],
)
def test_a_terminal_may_change_the_proposed_columns(
    init: Qinglan, monkeypatch: pytest.MonkeyPatch, header: str, answers: str, query: str, gold: str
):
    Path("q.csv").write_text(f"{header}\n钙片什么时候吃,a,鱼油一天吃几粒\n", encoding="utf-8")
    monkeypatch.setattr("sys.stdin", Terminal(answers + "\n\n\n"))
    assert init("test-acme", "--teacher", "embedded")[0] == 0
    assert load_profile("test-acme").data.columns == Columns(query=query, gold=gold)


def test_what_doctor_finds_is_shown_and_the_profile_stays(qinglan: Qinglan):
    paid = (
        "--teacher",
        "big",
        "--teacher-url",
        "http://127.0.0.1:9/v1",
        "--teacher-key-env",
        "BIG_KEY",
    )
    options = ("--workbook", "q.csv", "--rag-url", "embedded", "--teacher-price", "1,2", "--yes")
    status, out, err = qinglan("init", "test-acme", *options, *paid)
    assert (status, err, load_profile("test-acme").teacher.model) == (0, "", "big")
    assert "✗ teacher big needs the environment variable BIG_KEY" in out
    assert out.endswith("correct that, then: qinglan doctor --profile test-acme --flow refresh\n")
