"""Reviews on disk and on rows: the newest verdict counts, and holds for what was looked at."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from qinglan.config import Profile
from qinglan.data import review as store
from qinglan.data.review import Review, Reviews, add_reviews, fingerprint, load_reviews, store_path
from qinglan.errors import ArtifactError
from qinglan.rows import Row

ProfileOf = Callable[..., Profile]


def row(row_id: str = "r1", answer: str | None = "头疼 缓解", **changes: Any) -> Row:
    return Row(id=row_id, tenant="default", query="头疼", source="q.csv:2", answer=answer, **changes)


def review(verdict: str = "accept", row_id: str = "r1", answer: str = "头疼 缓解", **changes: Any) -> Review:
    corrected = "头痛 缓解 方法" if verdict == "correct" else None
    values = {"tenant": "default", "imported_at": "2026-11-01T00:00:00+00:00", "file": "a.xlsx", "file_sha256": "f1"}
    values |= {"row": row_id, "verdict": verdict, "answer": answer, "fingerprint": fingerprint(answer)}
    return Review.model_validate(values | {"corrected": corrected} | changes)


def verdict_on(seen: Row, *reviews: Review) -> tuple[str | None, str | None]:
    (after,) = Reviews(reviews).apply([seen])
    assert after.model_copy(update={"review": seen.review, "corrected": seen.corrected}) == seen
    return after.review, after.corrected


@pytest.mark.parametrize("verdict", ["accept", "reject"])
def test_a_verdict_holds_while_the_rewrite_is_the_one_that_was_reviewed(verdict: str):
    assert verdict_on(row(), review(verdict)) == (verdict, None)
    assert verdict_on(row(answer=" 头疼  缓解\n"), review(verdict)) == (verdict, None)
    assert verdict_on(row(answer="头疼 缓解 方法", review=verdict), review("correct"), review(verdict)) == (None, None)


@pytest.mark.parametrize("rewrite", ["头疼 缓解", "别的", None])
def test_a_correction_holds_whatever_the_teacher_says(rewrite: str | None):
    after = next(Reviews([review("correct")]).apply([row(answer=rewrite)]))
    assert (after.review, after.target) == ("correct", "头痛 缓解 方法")


def test_the_digest_is_of_what_reviews_do():
    one = Reviews([review(), review("reject", "r2")]).digest
    assert one == Reviews([review("reject", "r2"), review("reject"), review(comment="好", reviewer="王")]).digest
    others = [[], [review()], [review("reject"), review("reject", "r2")], [review("correct"), review("reject", "r2")]]
    assert len({one, *(Reviews(other).digest for other in others)}) == 5
    assert Reviews([review("correct")]).digest == Reviews([review("correct", answer="别的")]).digest


def test_later_verdicts_are_appended_and_earlier_lines_stay(profile_of: ProfileOf):
    profile = profile_of()
    assert load_reviews(profile).by_row == {}
    reviews = [review(comment="一\n二 \u2028=1+1"), review(row_id="r2")]
    add_reviews(profile, reviews)
    assert list(load_reviews(profile).by_row.values()) == reviews
    first = store_path(profile).read_bytes()
    added = add_reviews(profile, [review("reject", file_sha256="f2"), review(row_id="r2", file_sha256="f2")])
    assert (len(added.new), added.unchanged, added.replaced) == (1, 1, 1)
    assert store_path(profile).read_bytes().startswith(first)
    assert load_reviews(profile).by_row["r1"].verdict == "reject"
    colleague = add_reviews(profile, [review("reject", file_sha256="f3", reviewer="李")])
    assert (len(colleague.new), colleague.replaced) == (1, 0)


def test_an_old_file_imported_again_does_not_undo_later_verdicts(profile_of: ProfileOf):
    profile = profile_of()
    add_reviews(profile, [review()])
    add_reviews(profile, [review("reject", file_sha256="f2")])
    assert add_reviews(profile, [review()]).unchanged == 1
    assert load_reviews(profile).by_row["r1"].verdict == "reject"


def test_a_process_killed_while_it_writes_loses_nothing(profile_of: ProfileOf, monkeypatch: pytest.MonkeyPatch):
    profile = profile_of()
    add_reviews(profile, [review()])
    with monkeypatch.context() as patched:
        patched.setattr(store.os, "fsync", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            add_reviews(profile, [review(row_id="r2"), review(row_id="r3")])
    assert list(load_reviews(profile).by_row) == ["r1"]
    add_reviews(profile, [review(row_id="r2"), review(row_id="r3")])
    assert list(load_reviews(profile).by_row) == ["r1", "r2", "r3"]


def test_imports_at_the_same_time_lose_nothing(profile_of: ProfileOf):
    profile = profile_of()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: add_reviews(profile, [review(row_id=f"r{n}")]), range(8)))
    assert len(load_reviews(profile).by_row) == 8


@pytest.mark.parametrize("damage", [b'{"tenant": "def', b"\xff\xfe\n", b"{}\n"])
def test_a_damaged_line_is_named_and_never_skipped(profile_of: ProfileOf, damage: bytes):
    profile = profile_of()
    add_reviews(profile, [review()])
    path = store_path(profile)
    path.write_bytes(path.read_bytes() + damage)
    with pytest.raises(
        ArtifactError, match=r"default\.query_rewrite\.jsonl:2: is no review \(.*restore the file from a backup"
    ):
        load_reviews(profile)


def test_every_tenant_has_a_file_of_its_own_inside_the_folder(profile_of: ProfileOf, tmp_path: Path):
    ids = ["default", "Default", "../x", "..", "a/b", "a b", "青蓝", "澄拉", "x" * 300, "x" * 299, "con.jsonl", "-"]
    paths = {store_path(profile_of(tenant={"id": tenant})) for tenant in ids}
    assert len({str(path).lower() for path in paths}) == len(ids)
    assert {path.parent for path in paths} == {tmp_path / "state" / "reviews"}
    assert all(path.stem and len(path.name) < 80 for path in paths)
