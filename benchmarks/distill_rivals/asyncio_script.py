"""The plan's own script: AsyncOpenAI behind a semaphore, retried by tenacity, tables at the end.

It has no ledger.

    python asyncio_script.py ROWS.jsonl BASE_URL MODEL CONCURRENCY OUT_FOLDER
"""

import asyncio
import json
import sys
from pathlib import Path

import pandas as pd
from openai import AsyncOpenAI
from tenacity import retry, stop_after_attempt, wait_exponential


async def ask_all(
    questions: list[dict[str, str]], base_url: str, model: str, concurrency: int
) -> list[dict[str, str]]:
    """The rows with their rewrites."""
    client = AsyncOpenAI(base_url=base_url, api_key="bench", timeout=60)
    slots = asyncio.Semaphore(concurrency)

    @retry(wait=wait_exponential(min=1, max=30), stop=stop_after_attempt(3))
    async def ask(system: str, user: str) -> str:
        response = await client.chat.completions.create(
            model=model,
            messages=[{"role": "system", "content": system}, {"role": "user", "content": user}],
            temperature=0.7,
            max_tokens=128,
        )
        return response.choices[0].message.content or ""

    async def rewrite(row: dict[str, str]) -> dict[str, str]:
        async with slots:
            return {**row, "rewrite": await ask(row["system"], row["user"])}

    return await asyncio.gather(*(rewrite(row) for row in questions))


def main(rows: Path, base_url: str, model: str, concurrency: int, out: Path) -> None:
    """Ask all, then write."""
    questions = [json.loads(line) for line in rows.read_text(encoding="utf-8").splitlines()]
    rewritten = pd.DataFrame(asyncio.run(ask_all(questions, base_url, model, concurrency)))
    rewritten.to_json(out / "rows.jsonl", orient="records", lines=True, force_ascii=False)
    rewritten.to_excel(out / "rows.xlsx", index=False)
    print(json.dumps({"rows": int(rewritten["rewrite"].astype(bool).sum())}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]), Path(sys.argv[5]))
