"""distilabel by its documentation: `TextGeneration` with `OpenAILLM` in a `Pipeline`, its cache on.

    python distilabel_script.py ROWS.jsonl BASE_URL MODEL CONCURRENCY OUT_FOLDER

distilabel sends a batch at once and waits for all of it, so a batch has as many rows as requests
may be under way. Tried on 1,000 rows and slower: loading one batch at a time, and two or four
replicas of the step with their part of the requests each (98 and 52 rows/s to 128), which never had
requests under way at the same time.
"""

import json
import sys
from pathlib import Path

from distilabel.models import OpenAILLM
from distilabel.pipeline import Pipeline
from distilabel.steps import LoadDataFromDicts
from distilabel.steps.tasks import TextGeneration


def main(rows: Path, base_url: str, model: str, concurrency: int, out: Path) -> None:
    """Ask all, then write."""
    questions = [json.loads(line) for line in rows.read_text(encoding="utf-8").splitlines()]
    data = [
        {"id": row["id"], "system_prompt": row["system"], "instruction": row["user"]}
        for row in questions
    ]
    with Pipeline(name="rewrite", cache_dir=out / "cache") as pipeline:
        load = LoadDataFromDicts(data=data, batch_size=8 * concurrency)
        teacher = TextGeneration(
            llm=OpenAILLM(
                model=model,
                base_url=base_url,
                api_key="bench",
                generation_kwargs={"temperature": 0.7, "max_new_tokens": 128},
            ),
            input_batch_size=concurrency,
        )
        load >> teacher
    rewritten = pipeline.run()["default"]["train"]
    rewritten.to_json(out / "rows.jsonl", force_ascii=False)
    print(json.dumps({"rows": sum(bool(text) for text in rewritten["generation"])}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]), Path(sys.argv[5]))
