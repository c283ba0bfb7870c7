"""The panel with the simulated judge over HTTP: what is paid for, and what is not paid for again."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from qinglan.clients.roles import Services, open_clients, site_ledger
from qinglan.config import Profile
from qinglan.data.workbook import read_rows
from qinglan.evaluation.teacher_comparison import ask_teacher
from qinglan.recipes.kinds.measuring import Panel, retrieve_all
from qinglan.recipes.query_rewrite import RECIPE
from qinglan.rows import ArmRow, Row
from qinglan.runs.run import Run
from qinglan.simulators.domains.query_rewrite import write_sample
from qinglan.simulators.services import embedded_services

pytestmark = pytest.mark.slow
ROWS = 30
PRICE = {"input_per_million_usd": 1.0, "output_per_million_usd": 1.0}
Arms = dict[str, list[ArmRow]]


class Site:
    def __init__(self, profile: Profile, services: Services, rows: list[Row], folder: Path) -> None:
        self.profile, self.services, self.rows = profile, services, rows
        self._folder = folder

    def run(self, name: str) -> tuple[Arms, dict[str, int]]:
        """Two teachers and the bare question: asked, retrieved with, judged; and what of it the ledger knew."""
        run = Run(id=name, flow="evaluate", profile=self.profile, directory=self._folder)

        async def work() -> tuple[Arms, dict[str, int]]:
            async with open_clients(run, self.services, ("teacher", "judge", "rag")) as clients:
                arms: Arms = {
                    "original": [ArmRow(row_id=row.id, text=row.query) for row in self.rows],
                    "teacher": await ask_teacher(self.rows, RECIPE, clients, self.profile.tenant, 0.05),
                }
                found = await retrieve_all(arms, self.rows, clients, 0.05)
                judged, unjudged = await Panel(RECIPE, clients, self.profile.tenant).judge(found, self.rows)
                assert unjudged == {}
                return judged, clients.call_counts()["judge"]

        return asyncio.run(work())


@pytest.fixture
def site(tmp_path: Path, profile_of: Callable[..., Profile]) -> Iterator[Site]:
    profile = profile_of(
        teacher={"model": "simulated-rewriter"},
        judge={"model": "simulated-judge"},
        prices={"simulated-rewriter": PRICE, "simulated-judge": PRICE},
        embedded={"sample_train_rows": 1, "sample_dev_rows": 1, "sample_test_rows": ROWS, "fault_rate": 0.05},
    )
    sample = write_sample(tmp_path, profile.embedded)
    rows = [row for row in read_rows(sample.workbook, profile.data, profile.tenant) if row.split == "test"]
    with embedded_services(profile, sample.knowledge_base) as services:
        yield Site(profile, services, rows, tmp_path)


def test_two_calls_a_question_kept_in_the_ledger_and_never_paid_again(site: Site):
    arms, _ = site.run("first")
    again, counts = site.run("second")
    with site_ledger(site.profile) as ledger:
        assert ledger.usage("first", "judge").calls - ledger.usage("first", "judge").failed == 2 * ROWS
        assert ledger.usage("second", "judge").calls == 0
        calls = ledger.get_many({key for arm in arms.values() for entry in arm for key in entry.requests})
    assert counts == {"cached": 2 * ROWS}
    assert {call.role for call in calls.values()} == {"teacher", "judge"} and len(calls) == 3 * ROWS
    assert [entry.judge_scores for entry in again["teacher"]] == [entry.judge_scores for entry in arms["teacher"]]
