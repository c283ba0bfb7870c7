"""Profiles: overrides, one-line errors with the nearest right name, secrets by name only."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_service import PRICE

from qinglan.config import load_profile
from qinglan.config.training import Rl, Sft
from qinglan.errors import ConfigError

RAW: dict[str, Any] = {
    "name": "test",
    "teacher": {"model": "big"},
    "judge": {"model": "big"},
    "prices": {"big": PRICE},
}


def profile_file(tmp_path: Path, **sections: Any) -> str:
    path = tmp_path / "p.yaml"
    path.write_text(yaml.safe_dump(RAW | sections, allow_unicode=True), encoding="utf-8")
    return str(path)


def error_of(name_or_path: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_profile(name_or_path, overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_profile_is_laid_over_the_one_that_it_extends(tmp_path: Path) -> None:
    profile_file(tmp_path, gate={"rivals": ["sft", "teacher"], "min_gain": 0.01})
    above = tmp_path / "above.yaml"
    above.write_text("{extends: p.yaml, gate: {rivals: [base]}}", encoding="utf-8")
    profile = load_profile(str(above), ["gate.min_gain=0.02"])
    assert (profile.name, profile.teacher.model) == ("above", "big"), (
        "a name is never that of the one below"
    )
    assert (profile.gate.rivals, profile.gate.min_gain) == (("base",), 0.02)
    assert load_profile(str(above), ["name=other"]).name == "other"


def test_a_profile_that_is_named_by_its_file_has_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "acme.yaml").write_text(
        "{extends: embedded, name: acme-prod}", encoding="utf-8"
    )
    monkeypatch.chdir(tmp_path)
    assert "`name`: is acme-prod, and the file's is acme; leave it out" in error_of("acme")
    assert load_profile("configs/acme.yaml").name == "acme-prod", "by its path it may have another"


def test_a_profile_extends_one_that_is_there_and_not_itself(tmp_path: Path) -> None:
    own = profile_file(tmp_path, extends=str(tmp_path / "p.yaml"))
    assert error_of(own) == f"profile {own}: extends itself; name another profile"
    assert "did you mean `embedded`?" in error_of(profile_file(tmp_path, extends="embeded"))
    profile_file(tmp_path, recipe=str(tmp_path / "mine.py"))
    above = tmp_path / "above.yaml"
    above.write_text("rehearses: p.yaml", encoding="utf-8")
    assert "mine.py has no demo profile; these have one: query_rewrite" in error_of(str(above))
    unpriced = profile_file(tmp_path, prices={})
    assert error_of(str(above)).startswith(f"profile {unpriced}: ")
    above.write_text("{extends: embedded, rehearses: p.yaml}", encoding="utf-8")
    assert "`extends` and `rehearses` exclude each other; give one of them" in error_of(str(above))


def test_a_rehearsal_has_a_tenant_of_its_own_and_nothing_of_the_site(tmp_path: Path) -> None:
    cheap = {"input_per_million_usd": 0.5, "output_per_million_usd": 0.5}
    profile_file(
        tmp_path,
        recipe="answer_judge",
        answerer={"model": "small"},
        judge={"model": "small"},
        prices={"big": PRICE, "small": cheap, "ours": cheap},
        student={"name": "ours"},
        rl={"algorithm": "grpo", "rollouts_per_prompt": 16},
        release={"name": "prod", "promote": "none"},
        gate={"approval": "required", "min_gain": 0.01},
        evaluate={"red_team": "cases.xlsx", "retries": 5},
        dataset={"decontaminate_against": ["kept.xlsx"], "train_share": 0.7},
    )
    above = tmp_path / "above.yaml"
    above.write_text("rehearses: p.yaml", encoding="utf-8")
    rehearsed = load_profile(str(above))
    assert rehearsed.tenant.id == "rehearsal_test"
    assert rehearsed.model_name == "qinglan.rehearsal_test.answer_judge"
    assert rehearsed.release.promote == "none"
    assert (rehearsed.gate.approval, rehearsed.gate.min_gain) == ("none", 0.01)
    assert (rehearsed.evaluate.red_team, rehearsed.evaluate.retries) == (None, 5)
    dataset = rehearsed.dataset
    assert (dataset.decontaminate_against, dataset.train_share) == ((), 0.7)
    prices = {
        name: price.model_dump(exclude_unset=True) for name, price in rehearsed.prices.items()
    }
    assert prices == {
        rehearsed.teacher.model: PRICE,
        "simulated-answerer": cheap,
        rehearsed.student.name: cheap,
    }


def test_overrides_are_yaml_values_at_dotted_keys(tmp_path: Path) -> None:
    overrides = [
        "data.columns.query=用户问题",
        "data.limit=10",
        "rl.actor_lr=1e-5",
        "sft.extra={packing: true}",
    ]
    profile = load_profile(profile_file(tmp_path), overrides)
    assert (profile.data.columns.query, profile.data.limit, profile.rl.actor_lr) == (
        "用户问题",
        10,
        1e-5,
    )
    assert profile.sft.extra == {"packing": True}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("sft.learning_rat=1", "unknown key `sft.learning_rat`; did you mean `learning_rate`?"),
        (
            "answerer={model: small, base_ur: x}",
            "unknown key `answerer.base_ur`; did you mean `base_url`?",
        ),
        ("sfft.lora_rank=1", "unknown key `sfft`; did you mean `sft`?"),
        ("teacher.model=other", "prices has no entry for teacher.model 'other'"),
        (
            "dataset.rl_shares={red_team: 0.25, train: 0.5}",
            "rl_shares: add up to 0.75; make them add up to 1",
        ),
        ("dataset.rl_shares={red_team: 0.8, gold: 0.3}", "rl_shares: add up to 1.1"),
        ("select.boilerplate=['(']", "`select.boilerplate.0`: '(' is no regular expression"),
        (
            "rag.mapping.request={q: '{txt}'}",
            "`rag.mapping.request`: there is no placeholder {txt}",
        ),
        ("rag.mapping.request={q: ['on {text}']}", "a placeholder must be a whole value"),
        ("rag.mapping.request={q: '{query}'}", "no rewrite would be sent"),
        ("rag.mapping.score='a['", "'a[' is no JMESPath"),
        ("rag.mapping.divide_by=3", "belong together"),
        (
            "data.pool_shares={gold: 0.7, red_team: 0.4}",
            "`data`: pool_shares: add up to 1.1; make them add up to 1",
        ),
        ("evaluate.bootstrap_resamples=99", "greater than or equal to 100"),
        ("gate.challenger=base", "`gate.challenger`: Input should be 'sft' or 'rl'"),
        (
            "gate.rivals=[rl]",
            "gate.rivals: rl: name some of original, teacher, base, sft; "
            "the champion always is one",
        ),
        (
            "gate.rivals=[champion]",
            "gate.rivals: champion: name some of original, teacher, base, sft",
        ),
        ("gate.min_gain=0.05", "smallest_gain 0.03 is not above min_gain 0.05"),
        (
            "reward={win_weight: 0, retrieval_weight: 0}",
            "retrieval_weight + win_weight must be above 0",
        ),
        (
            "select.min_top1_score=2",
            "`select.min_top1_score`: Input should be less than or equal to 1, got 2",
        ),
        (
            "dataset.train_share=0.95",
            "`dataset`: train_share + dev_share must leave a share for the test split",
        ),
        (
            "rl={save_freq: 30, test_freq: 20}",
            "`rl`: save_freq (30) must be a multiple of test_freq (20); a checkpoint without",
        ),
        (
            "rl.train_batch_size=48",
            "`rl`: train_batch_size (48) must be a multiple of ppo_mini_batch_size (32)",
        ),
        (
            "rl.ppo_micro_batch_size_per_gpu=5",
            "(32) must be a multiple of GPUs × rl.ppo_micro_batch_size_per_gpu (1 × 5)",
        ),
        (
            "trainer.gpus_per_node=3",
            "must be a multiple of GPUs × rl.ppo_micro_batch_size_per_gpu (3 × 4)",
        ),
        (
            "rl.tensor_model_parallel_size=3",
            "(8) must be a multiple of rl.tensor_model_parallel_size (3)",
        ),
        ("trainer.stalled_after_s=600", "must be longer than reward.max_outage_s (600)"),
        (
            "gate.rivals=[sft, teach]",
            "gate.rivals: teach: name some of original, teacher, base, sft; ",
        ),
        (
            "evaluate.teachers=[cheap]",
            "evaluate.teachers: cheap is none of compare.teachers (none)",
        ),
        ("data", "--set 'data': write it as dotted.key=value"),
        ("=1", "write it as dotted.key=value"),
        ("data.limit=[", "the value is not valid YAML"),
        ("name.x=1", "`name` is a value, not a section"),
    ],
)
def test_wrong_overrides_name_key_and_hint(tmp_path: Path, override: str, message: str) -> None:
    assert message in error_of(
        "fivedoctors" if "tensor" in override else profile_file(tmp_path), override
    )


def test_a_workbook_that_others_write_needs_a_budget(tmp_path: Path) -> None:
    for workbook in ("log", "./log/2026-11-21.jsonl"):
        path = profile_file(
            tmp_path, data={"workbook": workbook}, serve={"request_log": {"folder": "log"}}
        )
        said = error_of(path)
        assert "data.workbook is the router's request log" in said
        assert "set budget.per_run_usd or per_month_usd" in said
        assert load_profile(path, ["budget.per_month_usd=5"]).reads_request_log
        assert not load_profile(path, ["data.workbook=other"]).reads_request_log
    assert "serve.try_page asks the teacher" in error_of(
        profile_file(tmp_path), "serve.try_page=with_teacher"
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a: [", "not valid YAML"),
        (b"- a\n", "expected sections such as `teacher:`, found list"),
        (b"", "expected sections such as `teacher:`, found NoneType"),
        (b"name: \xff\n", "can't be read"),
        (b"name: x\njudge: {model: m}\nprices: {}\n", "`teacher` is missing; add it"),
    ],
)
def test_unreadable_profiles(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "p.yaml").write_bytes(content)
    assert message in error_of(str(tmp_path / "p.yaml"))
    assert "no such file" in error_of(str(tmp_path / "no.yaml"))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            "teacher.api_key_env=sk-s3cret",
            "write the name of an environment variable here, in capitals, never the key",
        ),
        ("teacher.api_key_env=s3cret", "in capitals, never the key itself"),
        ("rag.url=http://me:s3cret@rag/q", "holds a password"),
        ("tracking.uri=postgresql://me:s3cret@db/mlflow", "holds a password"),
        ("trainer.ray_dashboard_url=https://s3cret@head", "holds a password"),
        ("trainer.ray_dashboard_url=http://head?a=1&Password=s3cret", "holds a password"),
        ("trainer.ray_dashboard_url=http://head?api_key=s3cret", "holds a password"),
    ],
)
def test_a_secret_is_refused_unseen(setting: str, message: str) -> None:
    said = error_of("embedded", setting)
    assert message in said
    assert "s3cret" not in said


def test_a_part_of_an_address_that_only_looks_like_a_secret_is_taken() -> None:
    uri = "postgresql://mlflow@db/mlflow?sslmode=require&sslkey=client.key&max_tokens_x=1"
    assert load_profile("embedded", [f"tracking.uri={uri}"]).tracking.uri == uri


@pytest.mark.parametrize(
    ("settings", "rows", "gpus", "expected"),
    [
        # 8 GPUs × 2 rows, 35 batches an epoch.
        ({"gradient_accumulation_steps": 1}, 560, 8, (105, 10, 10)),
        ({"gradient_accumulation_steps": 8}, 560, 8, (15, 1, 1)),
        ({"eval_steps": "auto", "save_steps": 50}, 5000, 1, (939, 50, 50)),
        ({"eval_steps": 5, "save_steps": "auto"}, 1, 1, (3, 5, 5)),
    ],
)
def test_the_schedule_of_sft_follows_from_its_rows(
    settings: dict[str, Any], rows: int, gpus: int, expected: tuple[int, int, int]
) -> None:
    sft = Sft.model_validate(settings)
    planned = sft.scheduled(rows, gpus)
    assert (sft.steps(rows, gpus), planned.eval_steps, planned.save_steps) == expected


@pytest.mark.parametrize(
    ("settings", "prompts", "expected"),
    [
        ({"epochs": 10, "train_batch_size": 128}, 1000, (78, 7, 7)),
        ({"epochs": 1, "train_batch_size": 128}, 10, (1, 1, 1)),
        ({"total_steps": 30, "test_freq": 5}, 1000, (30, 5, 5)),
        ({"total_steps": 30, "save_freq": 15}, 1000, (30, 15, 15)),
    ],
)
def test_the_schedule_of_rl_follows_from_its_prompts(
    settings: dict[str, Any], prompts: int, expected: tuple[int, int, int]
) -> None:
    planned = Rl.model_validate(settings).scheduled(prompts)
    assert (planned.total_steps, planned.test_freq, planned.save_freq) == expected
