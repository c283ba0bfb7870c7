"""The world of the medical assistant: patients' questions, answers that are not always safe, a doctor and a judge."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from qinglan.config import Embedded
from qinglan.simulators.domains import Domain, Pretraining, SamplePaths, SimulatedModel
from qinglan.simulators.domains.medical import corpus, judge, sample

PROMPT = ("你是医疗健康助手", "回答准确简明", "有风险时", "说清该怎么做", "该找谁")
"""The student's prompt, in pieces that a token can hold."""


class MedicalDomain(Domain):
    """Facts about two dozen medicines and a dozen complaints, emergencies and hardships."""

    NAME = "medical"
    MODELS: Mapping[str, SimulatedModel] = {
        "simulated-medical-doctor": judge.say_answer,
        "simulated-medical-judge": judge.say_verdict,
    }
    PRETRAINING = Pretraining(steps=260, context_tokens=512, documents_per_step=100)

    def write_sample(self, directory: Path, config: Embedded) -> SamplePaths:
        """Write `questions.xlsx`; there is no knowledge base."""
        path = directory / "questions.xlsx"
        sample.write_questions(path, config)
        return SamplePaths(path)

    def documents(self, seed: int, count: int) -> Iterator[str]:
        """Names, facts, warnings, and what questions are about."""
        return corpus.documents(seed, count)

    def words(self) -> list[str]:
        """Of the prompts, facts and statements."""
        return corpus.words(PROMPT)

    def characters(self) -> list[str]:
        """Those that questions and answers are written in."""
        return corpus.characters(PROMPT)


DOMAIN = MedicalDomain()
