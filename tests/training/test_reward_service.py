"""The reward service as a real Ray actor: one for all workers; killed in the middle, it buys
nothing twice."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from fake_service import completion, recall
from fixture_types import Serve
from ledger_calls import ledger_in
from reward_service import extra_info, reward_service, rewritten_row
from waiting import processes_with, wait_until

from qinglan.config import Endpoint, Rag, Reward
from qinglan.runs.launcher import JsonlTail
from qinglan.training.engines.verl import REWARD_FUNCTION
from qinglan.training.reward_service.settings import RewardService

pytestmark = pytest.mark.slow
pytest.importorskip("ray")

CONCURRENCY, EACH, SHARED = 4, 40, 20
DISTINCT = 2 * EACH - SHARED
DRIVER = """
import asyncio, json, sys
import ray
from qinglan.runs.locks import ray_start_lock
from qinglan.training.reward_service.function import close_reward_service, start_reward_service

@ray.remote(num_cpus=0)
class RewardWorker:
    async def score(self, info, texts, path):
        from qinglan.training.reward_service.function import compute_score
        scores = [compute_score("d", text, "", info, config_path=path) for text in texts]
        return await asyncio.gather(*scores)

path, info, parts = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
with ray_start_lock():
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
service = start_reward_service(path)
workers = [RewardWorker.remote() for _ in parts]
scored = ray.get([worker.score.remote(info, texts, path) for worker, texts in zip(workers, parts)])
close_reward_service(service)
with open(path + ".scored", "w") as stream:
    json.dump(scored, stream)
"""


class SlowRag:
    """Answers after a while, and after `holds_after` requests not before `released`; knows how many
    asked at once."""

    def __init__(self, holds_after: int) -> None:
        self.under_way = self.most = self.held = self._asked = 0
        self.released, self._holds_after, self._lock = (
            threading.Event(),
            holds_after,
            threading.Lock(),
        )

    def __call__(self, _: dict[str, Any]) -> Any:
        with self._lock:
            self.under_way += 1
            self._asked += 1
            self.most = max(self.most, self.under_way)
            is_held = self._asked > self._holds_after
            self.held += is_held
        time.sleep(0.25)
        if is_held:
            self.released.wait()
        with self._lock:
            self.under_way -= 1
        return 200, recall(("g", 0.9))


def start(folder: Path, service: RewardService, parts: list[list[str]]) -> subprocess.Popen[bytes]:
    path = folder / "reward.json"
    path.write_text(service.model_dump_json(), encoding="utf-8")
    info = json.dumps(extra_info(rewritten_row()))
    argv = [sys.executable, "-c", DRIVER, str(path), info, json.dumps(parts)]
    with (folder / "driver.log").open("w") as log:
        return subprocess.Popen(argv, stdout=log, stderr=log, start_new_session=True)


def kept_retrievals(folder: Path) -> int:
    with ledger_in(folder) as ledger:
        return len(ledger.retrieval_keys("r"))


def test_a_killed_service_comes_back_and_buys_nothing_twice(tmp_path: Path, serve: Serve):
    slow = SlowRag(holds_after=DISTINCT // 2)
    rag, judge = serve(slow), serve(lambda _: (200, completion('{"score": 4}')))
    texts = [f"虾青素 用量{number}" for number in range(DISTINCT)]
    service = reward_service(
        tmp_path,
        reward=Reward(relevance_gate=False),
        rag=Rag(concurrency=CONCURRENCY),
        rag_url=rag.url,
        judge=Endpoint(model="j", concurrency=CONCURRENCY),
        judge_url=judge.url,
    )
    driver = start(tmp_path, service, [texts[:EACH], texts[EACH - SHARED :]])
    try:
        # As many are held as it asks at once: until they are answered it asks no more.
        log = tmp_path / "driver.log"
        wait_until(
            "the RAG's holding", lambda: slow.held == CONCURRENCY or driver.poll() is not None
        )
        assert driver.poll() is None, log.read_text()[-3000:]
        wait_until(
            "what the RAG answered to be kept", lambda: kept_retrievals(tmp_path) == DISTINCT // 2
        )
        (actor,) = processes_with("ray::RewardActor", started_by=driver.pid)
        most_before, asked = slow.most, len(rag.bodies)
        actor.kill()
        actor.wait(timeout=120)
        kept = kept_retrievals(tmp_path)
        slow.released.set()
        driver.wait(timeout=900)
    finally:
        slow.released.set()
        if driver.poll() is None:
            os.killpg(driver.pid, signal.SIGKILL)
            driver.wait()
    assert driver.returncode == 0, (tmp_path / "driver.log").read_text()[-3000:]
    one, other = json.loads((tmp_path / "reward.json.scored").read_text())
    assert {sample["invalid"] for sample in one + other} == {0}
    assert [sample["score"] for sample in one[-SHARED:]] == [
        sample["score"] for sample in other[:SHARED]
    ]
    assert most_before == CONCURRENCY
    # What was on the wire when it was killed is asked again; what was answered is not.
    assert DISTINCT <= len(rag.bodies) <= DISTINCT + CONCURRENCY
    assert (
        DISTINCT <= len(judge.bodies) <= DISTINCT + CONCURRENCY + 8
    )  # or answered and being committed
    with ledger_in(tmp_path) as ledger:
        assert ledger.usage("r", "judge").calls == DISTINCT
    # Of what the RAG answered since, nothing is lost, although nobody waits for that to be written.
    assert kept_retrievals(tmp_path) == kept + len(
        {body["rewritten_query"] for body in rag.bodies[asked:]}
    )
    logged = [entry for entry in JsonlTail(tmp_path / "samples.jsonl").new() if "score" in entry]
    assert {entry["text"] for entry in logged} == set(texts)


@pytest.mark.filterwarnings("ignore")  # verl and its libraries warn while they are imported
@pytest.mark.parametrize("error", [None, RuntimeError("out of memory")])
def test_the_service_is_closed_however_training_ends(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None
):
    pytest.importorskip("verl")
    from omegaconf import OmegaConf

    from qinglan.training.engines import ppo

    closed: list[Any] = []

    def train(_self: object, _config: object) -> str:
        assert closed == []
        if error:
            raise error
        return "trained"

    monkeypatch.setattr(ppo, "import_module", lambda _: None)
    monkeypatch.setattr(ppo, "start_reward_service", str)
    monkeypatch.setattr(ppo, "close_reward_service", closed.append)
    monkeypatch.setattr(ppo.TaskRunnerV1.__ray_actor_class__, "run", train)
    function = {"path": REWARD_FUNCTION, "reward_kwargs": {"config_path": "reward.json"}}
    config = OmegaConf.create(
        {"reward": {"custom_reward_function": function}, "trainer": {"device": "cuda"}}
    )
    with pytest.raises(RuntimeError, match="out of memory") if error else nullcontext():
        assert ppo.TaskRunner().run(config) == "trained"
    assert closed == ["reward.json"]
