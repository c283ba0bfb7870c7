"""Time of a training step with a RAG that answers after 200 ms, beside one that answers at once.

    make bench NAME=reward_overlap
    ROLLOUT=vllm make bench NAME=reward_overlap     (after `make setup-vllm`)

Real verl on the CPU: PPO with a critic on an untrained Qwen3 of 1.5 M parameters, 256 samples a
step whose answers end at random, rewarded by the real reward service over HTTP. One run, in which
the RAG's latency changes with every step, so that both kinds meet the same machine; medians over
the steps after the first two. With `ROLLOUT=vllm`, vLLM's CPU build samples. No answer is known
before, and no judge is asked. Prints the table and writes benchmarks/results/reward_overlap.json,
with vLLM reward_overlap_vllm.json. Give a number of steps to take more or fewer than 16.
"""

import asyncio
import hashlib
import json
import os
import statistics
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from aiohttp import web
from verl_cpu import make_model

from qinglan.config import (
    Alarms,
    Budget,
    Endpoint,
    LedgerStore,
    Price,
    Profile,
    Rag,
    Reward,
    Tenant,
)
from qinglan.data.dataset.rl_rows import rl_record
from qinglan.grading.metrics import PrimaryMetric
from qinglan.recipes import query_rewrite
from qinglan.rows import Retrieved, Row
from qinglan.runs.launcher import Command, JsonlTail, launch
from qinglan.training.engines.progress import TrainerSettings, next_metrics_path
from qinglan.training.engines.verl import ppo_command
from qinglan.training.reward_service.samples import SampleWatch
from qinglan.training.reward_service.settings import RewardService

ROLLOUT = os.environ.get("ROLLOUT", "cpu")
_RESULT_NAME = "reward_overlap" if ROLLOUT == "cpu" else f"reward_overlap_{ROLLOUT}"
RESULT = Path(__file__).parent / "results" / f"{_RESULT_NAME}.json"
LATENCY_S = 0.2
TARGET_RATIO = 1.15
STEPS = 16
WARM_UP_STEPS = 2
SAMPLES = 256
RESPONSE_TOKENS = 96
MEAN_TOKENS = 32
CONCURRENCY = 128
POLL_S = 0.02
QUESTION = "第{}个问题：那个饭前吃还是饭后吃？"
TEACHER_REWRITE = "第{}个问题 服用时间"


class SimulatedRag:
    """Answers after `latency_s`; the score is a hash of the rewrite."""

    def __init__(self) -> None:
        self.latency_s = 0.0
        self.calls = 0
        self.under_way = 0
        self.most_under_way = 0

    async def answer(self, request: web.Request) -> web.Response:
        """Answer one retrieval."""
        self.calls += 1
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        body = await request.json()
        await asyncio.sleep(self.latency_s)
        self.under_way -= 1
        score = hashlib.sha256(body["rewritten_query"].encode()).digest()[0] / 255
        passage = {"id": "d", "title": "t", "content": "c", "reranker_score": score}
        return web.json_response({"data": {"recall": [passage]}})

    @contextmanager
    def serving(self) -> Iterator[str]:
        """Serve in a thread; yields the address."""
        loop = asyncio.new_event_loop()
        ready = threading.Event()
        ports: list[int] = []

        async def start() -> web.AppRunner:
            app = web.Application()
            app.router.add_post("/retrieve", self.answer)
            runner = web.AppRunner(app)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            ports.append(runner.addresses[0][1])
            return runner

        def serve() -> None:
            asyncio.set_event_loop(loop)
            runner = loop.run_until_complete(start())
            ready.set()
            loop.run_forever()
            loop.run_until_complete(runner.cleanup())

        thread = threading.Thread(target=serve, name="rag")
        thread.start()
        ready.wait()
        try:
            yield f"http://127.0.0.1:{ports[0]}/retrieve"
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()


class Alternation:
    """Changes the latency whenever a step has ended, and keeps each step's metrics by latency."""

    def __init__(self, rag: SimulatedRag, metrics: Path) -> None:
        self.steps: dict[float, list[dict[str, float]]] = {0.0: [], LATENCY_S: []}
        self._rag = rag
        self._tail = JsonlTail(metrics)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="alternation")

    @contextmanager
    def following(self) -> Iterator[None]:
        """Follow the training that goes on in the block."""
        self._thread.start()
        try:
            yield
        finally:
            self._ended.set()
            self._thread.join()

    def _follow(self) -> None:
        while not self._ended.wait(POLL_S):
            for entry in self._tail.new():
                if entry["step"] > WARM_UP_STEPS:
                    self.steps[self._rag.latency_s].append(entry["data"])
                # Odd and even steps take turns, so that both kinds meet the same machine.
                self._rag.latency_s = 0.0 if entry["step"] % 2 else LATENCY_S


def main(steps: int = STEPS) -> None:
    """Run, then print and write."""
    with tempfile.TemporaryDirectory(prefix="qinglan-bench-") as folder:
        result = measure(Path(folder), steps)
    load = result["load_before"]
    print(f"\n{SAMPLES} samples a step, RAG concurrency {CONCURRENCY}, load before {load:.1f}\n")
    print("| RAG's latency | step, s | generation and reward, s | steps |")
    print("| --- | ---: | ---: | ---: |")
    for figures in result["arms"]:
        times = f"{figures['step_s']:.2f} | {figures['gen_s']:.2f}"
        print(f"| {1000 * figures['latency_s']:.0f} ms | {times} | {figures['steps']} |")
    verdict = "met   " if result["ratio"] <= TARGET_RATIO else "MISSED"
    ratio = f"{result['ratio']:.3f} times as long, at most {TARGET_RATIO} wanted"
    print(f"\n{verdict}  a step takes {ratio};")
    print(f"        generation with rewards by itself {result['generation_ratio']:.3f} times")
    if steps >= STEPS:
        RESULT.parent.mkdir(exist_ok=True)
        RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        print(f"Written to {RESULT}")


def measure(folder: Path, steps: int) -> dict[str, Any]:
    """The figures of one run."""
    load = os.getloadavg()[0]
    rag = SimulatedRag()
    with rag.serving() as url:
        command = training(folder, url, steps)
        alternation = Alternation(rag, Path(command.env["VERL_FILE_LOGGER_PATH"]))
        with alternation.following():
            launch(command, name="verl", log=folder / "verl.log")
    at_once = arm(0.0, alternation.steps[0.0])
    late = arm(LATENCY_S, alternation.steps[LATENCY_S])
    watch = SampleWatch(folder / "samples.jsonl")
    invalid = watch.summary["samples_invalid"]
    if invalid:
        sys.exit(f"error: {invalid:.0f} samples without a score: {watch.last_invalid}")
    return {
        "cores": os.cpu_count(),
        "load_before": load,
        "samples": SAMPLES,
        "concurrency": CONCURRENCY,
        "response_tokens": statistics.mean((at_once["response_tokens"], late["response_tokens"])),
        "rag_calls": rag.calls,
        "rag_calls_counted": watch.calls["rag"]["calls"],
        "most_calls_at_once": rag.most_under_way,
        "arms": [at_once, late],
        "ratio": late["step_s"] / at_once["step_s"],
        "generation_ratio": late["gen_s"] / at_once["gen_s"],
    }


def arm(latency_s: float, steps: list[dict[str, float]]) -> dict[str, Any]:
    """Medians over the steps with one latency."""

    def median(name: str) -> float:
        return statistics.median(step[name] for step in steps)

    return {
        "latency_s": latency_s,
        "steps": len(steps),
        "step_s": median("timing_s/step"),
        "gen_s": median("timing_s/gen"),
        "response_tokens": median("response_length/mean"),
        "each_step_s": [step["timing_s/step"] for step in steps],
    }


def training(folder: Path, rag_url: str, steps: int) -> Command:
    """The command line of the pipeline's RL stage over the simulator."""
    make_model(folder / "model")
    end_at_random(folder / "model")
    (folder / "reward.json").write_text(
        reward_service(folder, rag_url).model_dump_json(), encoding="utf-8"
    )
    settings = TrainerSettings(
        folder=folder,
        max_invalid_share=0.0,
        use_labels=True,
        dev_metric="score",
        dev_rows=frozenset(),
        primary_metric=PrimaryMetric("score", "the reward"),
        patience=None,
        keep_checkpoints=None,
        alarms=Alarms(default_action="off"),
    )
    (folder / "trainer.json").write_text(settings.model_dump_json(), encoding="utf-8")
    return ppo_command(
        profile(steps),
        model=folder / "model",
        train_file=make_prompts(folder / "train.parquet", 4 * SAMPLES),
        dev_file=make_prompts(folder / "dev.parquet", SAMPLES),
        output_dir=folder / "rl",
        reward_config=folder / "reward.json",
        trainer_settings=folder / "trainer.json",
        metrics_path=next_metrics_path(folder),
        run_name="benchmark",
    )


def end_at_random(model: Path) -> None:
    """Let so many tokens end an answer that an untrained model's have about `MEAN_TOKENS`."""
    path = model / "generation_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    vocabulary = json.loads((model / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    config["eos_token_id"] = list(range(0, vocabulary, MEAN_TOKENS))
    path.write_text(json.dumps(config), encoding="utf-8")


def reward_service(folder: Path, rag_url: str) -> RewardService:
    """The reward of retrieval and guards only."""
    return RewardService(
        recipe="query_rewrite",
        parts=query_rewrite.RECIPE.grader.score_parts,
        reward=Reward(judge_weight=0, guard_min_judge=0, relevance_gate=False),
        rag=Rag(url=rag_url, concurrency=CONCURRENCY),
        rag_url=rag_url,
        retrieval_scope="benchmark",
        judge=Endpoint(model="none"),
        # Nobody listens there, so that a request to the judge would fail the run.
        judge_url="http://127.0.0.1:9/v1",
        judge_price=Price(input_per_million_usd=0, output_per_million_usd=0),
        judge_key_salt="",
        tenant=Tenant(),
        ledger=LedgerStore(),
        state=folder,
        budget=Budget(),
        run_id="benchmark",
        samples_log=folder / "samples.jsonl",
    )


def profile(steps: int) -> Profile:
    """PPO as in the embedded profile, with a learning rate at which answers keep their length."""
    endpoint = {"model": "none"}
    return Profile.model_validate(
        {
            "name": "benchmark",
            "teacher": endpoint,
            "judge": endpoint,
            "prices": {"none": {"input_per_million_usd": 0, "output_per_million_usd": 0}},
            "rl": {
                "rollout_engine": ROLLOUT,
                "total_steps": steps,
                "train_batch_size": SAMPLES,
                "ppo_mini_batch_size": SAMPLES // 2,
                "ppo_micro_batch_size_per_gpu": 64,
                "ppo_epochs": 1,
                "entropy_coefficient": 0.0,
                "gamma": 1.0,
                "lam": 1.0,
                "actor_lr": 1e-6,
                "critic_lr": 1e-3,
                "max_prompt_length": 96,
                "max_response_length": RESPONSE_TOKENS,
                "val_before_train": False,
                "extra": {"trainer.save_freq": -1, "trainer.test_freq": -1},
            },
            "trainer": {
                "device": "cpu",
                "threads": 2,
                "python": {"vllm": ".venv-vllm/bin/python"}.get(ROLLOUT),
            },
        }
    )


def make_prompts(path: Path, rows: int) -> Path:
    """Questions as the dataset stage writes them for verl."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    records = []
    for number in range(rows):
        row = Row(
            id=str(number),
            tenant="benchmark",
            query=QUESTION.format(number),
            source="benchmark",
            answer=TEACHER_REWRITE.format(number),
            answer_retrieved=Retrieved(scores=(0.5, 0.5, 0.5)),
        )
        record = rl_record(row, query_rewrite.RECIPE, Tenant(), number)
        record["prompt"] = [{"role": "user", "content": QUESTION.format(number)}]
        records.append(record)
    pq.write_table(pa.Table.from_pylist(records), path)
    return path


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
