"""A real verl run, rewarded through the real service, whose RAG fails, goes away for a while, or
stays away."""

import json
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
from reward_service import extra_info, reward_service, rewritten_row
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

STEPS, OUTAGE_S, SLACK_S = 12, 12.0, 60.0


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
        """Of the samples log, those that have these values."""
        return [line for line in JsonlTail(self.samples).new() if having.items() <= line.items()]

    def outages(self, state: str) -> list[dict[str, Any]]:
        return self.lines(outage="rag", state=state)

    def weights(self) -> str:
        """Their digest, after the last step."""
        return sha256_of(
            self.output / f"global_step_{STEPS}" / "actor" / "huggingface" / "model.safetensors"
        )


def add_baselines(path: Path) -> None:
    rows = pq.read_table(path).to_pylist()
    for number, row in enumerate(rows):
        baseline = rewritten_row(id=f"{path.stem}-{number}", teacher_judge=None)
        info = extra_info(baseline)
        del info["index"]
        row["extra_info"] |= info
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
        ]
        self._argv += ["--port", str(self.port), "--fault-rate", str(fault_rate)]
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
    folder, lasted_s = tmp_path_factory.mktemp("outlasted"), list[float]()
    with closing(RagServer(folder / "kb", fault_rate=0.1)) as server:
        toy = RewardedToy(
            folder, model_folder, server.port, max_outage_s=600, save_freq=2, test_freq=2
        )

        def go_away() -> None:
            """For a while after somebody has missed it."""
            wait_until("two steps", lambda: any(step >= 2 for step in read_metrics(folder)))
            before, gone_s = len(toy.outages("began")), time.monotonic()
            server.close()
            wait_until("a sample that waits", lambda: len(toy.outages("began")) > before)
            time.sleep(OUTAGE_S)
            server.start()
            lasted_s.append(time.monotonic() - gone_s)

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
    second = [
        json.loads(line)["step"] for line in (tmp_path / "metrics.2.jsonl").read_text().splitlines()
    ]
    assert second == list(
        range(saved, STEPS + 1)
    )  # validation before training stands at the step resumed from
    assert set(read_metrics(tmp_path)) == set(range(STEPS + 1))
    assert toy.weights() == outlasted[0].weights()


def give_up(toy: RewardedToy, server: RagServer) -> int:
    """The step of the checkpoint that a training left behind of which the RAG went away; the RAG is
    back then."""
    process = toy.start(toy.command())
    wait_until("two steps", lambda: 2 in read_metrics(toy.folder) or process.poll() is not None)
    server.close()
    assert process.wait(900) != 0
    stopped = read_stop(toy.folder)
    assert stopped is not None
    assert stopped[1]
    assert "could not be scored, more than reward.max_invalid_share = 5% allows" in stopped[0]
    assert toy.lines(failed_by="rag")
    (saved,) = checkpoints(toy.output)
    assert saved >= max(read_metrics(toy.folder)), (
        "what was learnt is kept, whatever save_freq says"
    )
    server.start()
    return saved
