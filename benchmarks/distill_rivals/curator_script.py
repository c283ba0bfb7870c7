"""bespokelabs-curator by its documentation: a `curator.LLM` with limits in `backend_params`.

    python curator_script.py ROWS.jsonl BASE_URL MODEL CONCURRENCY OUT_FOLDER

The two limits per minute are set far out of reach: left out, curator throttles to 200 requests a
minute.
"""

# Lets tiktoken take its encoding from the copy that litellm ships; curator has it downloaded
# otherwise.
import litellm.litellm_core_utils.default_encoding  # noqa: F401, I001 (before curator)

import json
import sys
from pathlib import Path
from typing import Any

from bespokelabs import curator
from datasets import Dataset


class Rewriter(curator.LLM):
    """One question, one rewrite."""

    def prompt(self, input: dict[str, Any]) -> list[dict[str, str]]:
        """The messages of a row."""
        return [
            {"role": "system", "content": input["system"]},
            {"role": "user", "content": input["user"]},
        ]

    def parse(self, input: dict[str, Any], response: str) -> dict[str, str]:
        """The row of an answer."""
        return {"id": input["id"], "rewrite": response}


def main(rows: Path, base_url: str, model: str, concurrency: int, out: Path) -> None:
    """Ask all, then write."""
    teacher = Rewriter(
        model_name=model,
        backend="openai",
        generation_params={"temperature": 0.7, "max_tokens": 128},
        backend_params={
            "base_url": base_url,
            "api_key": "bench",
            "max_concurrent_requests": concurrency,
            "max_requests_per_minute": 10**7,
            "max_tokens_per_minute": 10**10,
        },
    )
    questions = [json.loads(line) for line in rows.read_text(encoding="utf-8").splitlines()]
    rewritten = teacher(Dataset.from_list(questions), working_dir=str(out / "cache")).dataset
    rewritten.to_json(out / "rows.jsonl", force_ascii=False)
    print(json.dumps({"rows": sum(bool(text) for text in rewritten["rewrite"])}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]), Path(sys.argv[5]))
