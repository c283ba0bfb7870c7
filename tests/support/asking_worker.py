"""Asks the teacher about a folder's rows, as a process that a test ends.

python asking_worker.py FOLDER
"""

import asyncio
import sys
from functools import partial
from pathlib import Path

from qinglan.clients.roles import Addresses, open_clients, site_ledger
from qinglan.clients.row_batches import cut, in_order
from qinglan.config import Profile
from qinglan.recipes import get_recipe
from qinglan.rows import Row
from qinglan.runs.artifacts import read_jsonl, write_jsonl
from qinglan.runs.run import Run


def write_questions(folder: Path, profile: Profile, count: int) -> None:
    (folder / "profile.json").write_text(profile.model_dump_json(), encoding="utf-8")
    rows = [
        Row(id=str(number), tenant="t", query=f"虾青素{number}咋吃", source=f"q.csv:{number}")
        for number in range(count)
    ]
    write_jsonl(folder / "rows.jsonl", rows)


def paid(profile: Profile, run_id: str = "r") -> int:
    """Answers of the teacher that the ledger holds for a run."""
    with site_ledger(profile) as ledger:
        usage = ledger.usage(run_id, "teacher")
    return usage.calls - usage.failed


async def main(folder):
    profile = Profile.model_validate_json((folder / "profile.json").read_text())
    url = profile.teacher.base_url
    run = Run(id="r", flow="refresh", profile=profile, directory=folder)
    async with open_clients(run, partial(Addresses, url, url, url), ("teacher",)) as clients:
        work = partial(get_recipe(profile.recipe).distill, clients=clients, tenant=profile.tenant)
        batches = cut(read_jsonl(folder / "rows.jsonl", Row), 25)
        print("asking", flush=True)
        async for _ in in_order(
            batches, lambda batch: batch.run(work, last_attempt=True), at_once=4
        ):
            pass


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
