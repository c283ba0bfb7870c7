"""A real verl run, rewarded through the real service, whose RAG fails, goes away for a while, or
stays away."""

import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from reward_service import BASELINE, reward_service
from toy_rl import Toy
from waiting import wait_until

from qinglan.config import Embedded, Rag, Reward
from qinglan.runs.artifacts import sha256_of
from qinglan.runs.launcher import JsonlTail
from qinglan.runs.processes import free_port, health_problem
from qinglan.simulators.domains.query_rewrite import write_sample
from qinglan.training.engines.progress import checkpoints, read_metrics, read_stop
from qinglan.training.engines.verl import REWARD_FUNCTION

pytestmark = [pytest.mark.slow, pytest.mark.extended]
pytest.importorskip("verl")

STEPS = 12
OUTAGE_S = 12.0
SLACK_S = 60.0


class RewardedToy(Toy):
    """The toy, rewarded by what it retrieves; no judge."""

    def __init__(
        self, folder: Path, model_folder: Path, port: int, *, max_outage_s: float, **rl: Any
    ) -> None:
        super().__init__(
            folder, model_folder, **{"max_invalid_share": 0.05, "total_steps": STEPS} | rl
        )
        self.profile.rl.extra["reward.custom_reward_function.path"] = REWARD_FUNCTION
        self.samples = folder / "samples.jsonl"
        for path in (self.train, self.dev):
            add_baselines(path)
        off: dict[str, Any] = {"judge_weight": 0, "guard_min_judge": 0, "relevance_gate": False}
        service = reward_service(
            folder,
            reward=Reward(preservation_guard=False, max_outage_s=max_outage_s, **off),
            rag=Rag(max_retries=3, timeout_s=5),
            rag_url=f"http://127.0.0.1:{port}/retrieve",
        )
        self.reward_config.write_text(service.model_dump_json())

    def lines(self, **having: Any) -> list[dict[str, Any]]:
        """Lines of the samples log that have these values."""
        return [line for line in JsonlTail(self.samples).new() if having.items() <= line.items()]

    def outages(self, state: str) -> list[dict[str, Any]]:
        return self.lines(outage="rag", state=state)

    def weights(self) -> str:
        """The weights' digest after the last step."""
        actor = self.output / f"global_step_{STEPS}" / "actor"
        return sha256_of(actor / "huggingface" / "model.safetensors")


def add_baselines(path: Path) -> None:
    rows = pq.read_table(path).to_pylist()
    for number, row in enumerate(rows):
        row["extra_info"] |= BASELINE.model_dump()
        row["extra_info"] |= {"row_id": f"{path.stem}-{number}", "teacher_judge": -1.0}
    pq.write_table(pa.Table.from_pylist(rows), path)


class RagServer:
    """The embedded RAG on a port of its own, which can go away and come back."""

    def __init__(self, folder: Path, fault_rate: float = 0.0) -> None:
        self.port = free_port()
        sizes = Embedded(sample_train_rows=1, sample_dev_rows=1, sample_test_rows=1)
        documents = write_sample(folder, sizes).knowledge_base
        self._argv = [
            sys.executable,
            "-m",
            "qinglan.simulators.rag_server",
            "--knowledge-base",
            str(documents),
            "--port",
            str(self.port),
            "--fault-rate",
            str(fault_rate),
        ]
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(
            self._argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        wait_until("the RAG", lambda: not health_problem(f"http://127.0.0.1:{self.port}/health"))

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture(scope="module")
def outlasted(
    tmp_path_factory: pytest.TempPathFactory, model_folder: Path
) -> tuple[RewardedToy, float]:
    """A training that came through its RAG's faults and one outage, and how long that lasted."""
    folder = tmp_path_factory.mktemp("outlasted")
    lasted_s: list[float] = []
    with closing(RagServer(folder / "kb", fault_rate=0.1)) as server:
        toy = RewardedToy(
            folder, model_folder, server.port, max_outage_s=600, save_freq=2, test_freq=2
        )

        def go_away() -> None:
            """Let the RAG be away until a while after somebody has missed it."""
            wait_until("two steps", lambda: max(read_metrics(folder), default=0) >= 2)
            outages_before = len(toy.outages("began"))
            gone_at_s = time.monotonic()
            server.close()
            wait_until("a sample that waits", lambda: len(toy.outages("began")) > outages_before)
            time.sleep(OUTAGE_S)
            server.start()
            lasted_s.append(time.monotonic() - gone_at_s)

        breaking = threading.Thread(target=go_away)
        breaking.start()
        try:
            toy.run(toy.command())
        finally:
            breaking.join()
    assert lasted_s, "it came back"
    return toy, lasted_s[0]


def test_transient_faults_and_an_outage_cost_no_sample(
    outlasted: tuple[RewardedToy, float],
) -> None:
    toy, lasted_s = outlasted
    steps = read_metrics(toy.folder)
    trained = [steps[step] for step in range(1, STEPS + 1)]
    assert [step["reward_extra/samples"] for step in trained] == [16] * STEPS
    assert sum(step["reward_extra/invalid"] for step in trained) == 0
    assert sum(line.get("rag_failed", 0) for line in toy.lines()) > 0, "there were faults"
    waited_s = sum(line["seconds"] for line in toy.outages("ended"))
    assert OUTAGE_S <= waited_s < lasted_s + SLACK_S, "it costs about as long as it lasts"


def test_a_training_that_a_lost_rag_stops_goes_on_to_the_same_model_as_one_that_outlasts_it(
    tmp_path: Path, model_folder: Path, outlasted: tuple[RewardedToy, float]
) -> None:
    with closing(RagServer(tmp_path / "kb")) as server:
        toy = RewardedToy(
            tmp_path, model_folder, server.port, max_outage_s=3, save_freq=STEPS, test_freq=2
        )
        saved = give_up(toy, server)
        toy.run(toy.command())
    steps = [entry["step"] for entry in JsonlTail(tmp_path / "metrics.2.jsonl").new()]
    # Validation before training stands at the step resumed from.
    assert steps == list(range(saved, STEPS + 1))
    assert set(read_metrics(tmp_path)) == set(range(STEPS + 1))
    assert toy.weights() == outlasted[0].weights()


def give_up(toy: RewardedToy, server: RagServer) -> int:
    """Take a training's RAG away until it gives up, and bring it back; the step of the checkpoint
    that is left."""
    process = toy.start(toy.command())
    wait_until("two steps", lambda: 2 in read_metrics(toy.folder) or process.poll() is not None)
    server.close()
    assert process.wait(900) != 0
    stopped = read_stop(toy.folder)
    assert stopped is not None
    reason, failed = stopped
    assert failed
    assert "could not be scored, more than reward.max_invalid_share = 5% allows" in reason
    assert toy.lines(failed_by="rag")
    (saved,) = checkpoints(toy.output)
    assert saved >= max(read_metrics(toy.folder)), (
        "what was learnt is kept, whatever save_freq says"
    )
    server.start()
    return saved
