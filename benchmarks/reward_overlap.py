"""Does a slow RAG slow training down? A step with a RAG that answers after 200 ms, beside one that
answers at once.

    make bench NAME=reward_overlap ROLLOUT=vllm make bench NAME=reward_overlap     (vLLM's CPU build
    samples; `make setup-vllm` first)

Real verl on the CPU: PPO with a critic on an untrained Qwen3 of 1.5 M parameters, 256 samples a
step whose answers end at random, rewarded by the real reward service over HTTP. One run, in which
the RAG's latency changes with every step, so that both kinds meet the same machine; medians over
the steps after the first two. No answer is known before, and no judge is asked. Prints the table
and writes benchmarks/results/reward_overlap.json, with vLLM reward_overlap_vllm.json. Give a number
of steps to take more or fewer than 16.
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
RESULT = (
    Path(__file__).parent
    / "results"
    / f"reward_overlap{'' if ROLLOUT == 'cpu' else f'_{ROLLOUT}'}.json"
)
LATENCY_S, TARGET_RATIO = 0.2, 1.15
STEPS, WARM_UP_STEPS = 16, 2
SAMPLES, RESPONSE_TOKENS, MEAN_TOKENS = 256, 96, 32
CONCURRENCY = 128
POLL_S = 0.02
QUESTION, TEACHER_REWRITE = "第{}个问题：那个饭前吃还是饭后吃？", "第{}个问题 服用时间"


class SimulatedRag:
    """Answers after `latency_s`; the score is a hash of the rewrite."""

    def __init__(self) -> None:
        self.latency_s = 0.0
        self.calls = self.under_way = self.most_under_way = 0

    async def answer(self, request: web.Request) -> web.Response:
        """One retrieval."""
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
        """Its address, while it serves in a thread."""
        loop, ready = asyncio.new_event_loop(), threading.Event()
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
        self._rag, self._tail, self._ended = rag, JsonlTail(metrics), threading.Event()
        self.steps: dict[float, list[dict[str, float]]] = {0.0: [], LATENCY_S: []}
        self._thread = threading.Thread(target=self._follow, name="alternation")

    @contextmanager
    def following(self) -> Iterator[None]:
        """While training goes on."""
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
                self._rag.latency_s = 0.0 if entry["step"] % 2 else LATENCY_S


def main(steps: int = STEPS) -> None:
    """Run, then print and write."""
    with tempfile.TemporaryDirectory(prefix="qinglan-bench-") as folder:
        result = measure(Path(folder), steps)
    print(
        f"\n{SAMPLES} samples a step, RAG concurrency {CONCURRENCY}, load before {result['load_before']:.1f}\n"
    )
    print(
        "| RAG's latency | step, s | generation and reward, s | steps |\n| --- | ---: | ---: | ---: |"
    )
    for arm in result["arms"]:
        print(
            f"| {1000 * arm['latency_s']:.0f} ms | {arm['step_s']:.2f} | {arm['gen_s']:.2f} | {arm['steps']} |"
        )
    verdict = "met   " if result["ratio"] <= TARGET_RATIO else "MISSED"
    print(
        f"\n{verdict}  a step takes {result['ratio']:.3f} times as long, at most {TARGET_RATIO} wanted;"
    )
    print(f"        generation with rewards by itself {result['generation_ratio']:.3f} times")
    if steps >= STEPS:
        RESULT.parent.mkdir(exist_ok=True)
        RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        print(f"Written to {RESULT}")


def measure(folder: Path, steps: int) -> dict[str, Any]:
    """One run's figures."""
    load, rag = os.getloadavg()[0], SimulatedRag()
    with rag.serving() as url:
        command = training(folder, url, steps)
        alternation = Alternation(rag, Path(command.env["VERL_FILE_LOGGER_PATH"]))
        with alternation.following():
            launch(command, name="verl", log=folder / "verl.log")
    arms = [arm(latency_s, found) for latency_s, found in alternation.steps.items()]
    watch = SampleWatch(folder / "samples.jsonl")
    if watch.summary["samples_invalid"]:
        sys.exit(
            f"error: {watch.summary['samples_invalid']:.0f} samples without a score: {watch.last_invalid}"
        )
    return {
        "cores": os.cpu_count(),
        "load_before": load,
        "samples": SAMPLES,
        "concurrency": CONCURRENCY,
        "response_tokens": statistics.mean(arm["response_tokens"] for arm in arms),
        "rag_calls": rag.calls,
        "rag_calls_counted": watch.calls["rag"]["calls"],
        "most_calls_at_once": rag.most_under_way,
        "arms": arms,
        "ratio": arms[1]["step_s"] / arms[0]["step_s"],
        "generation_ratio": arms[1]["gen_s"] / arms[0]["gen_s"],
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
    """Let so many tokens end an answer that an untrained model's answers have about
    `MEAN_TOKENS`."""
    path = model / "generation_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    vocabulary = json.loads((model / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    config["eos_token_id"] = list(range(0, vocabulary, MEAN_TOKENS))
    path.write_text(json.dumps(config), encoding="utf-8")


def reward_service(folder: Path, rag_url: str) -> RewardService:
    """Retrieval and guards only."""
    return RewardService(
        recipe="query_rewrite",
        parts=query_rewrite.RECIPE.grader.score_parts,
        reward=Reward(judge_weight=0, guard_min_judge=0, relevance_gate=False),
        rag=Rag(url=rag_url, concurrency=CONCURRENCY),
        rag_url=rag_url,
        retrieval_scope="benchmark",
        judge=Endpoint(model="none"),
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
    """PPO as in the embedded profile, with a learning rate at which answers stay as long as they
    are."""
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
