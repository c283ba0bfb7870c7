"""The judge's world: references, a weak model that answers in six ways, and a strong one that says in which."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from qinglan.config import Embedded
from qinglan.simulators.domains import Domain, Pretraining, SamplePaths, SimulatedModel
from qinglan.simulators.domains.answer_judge import corpus, sample
from qinglan.simulators.domains.answer_judge import models as people


class AnswerJudgeDomain(Domain):
    """Wraps `domain`, `people`, `corpus` and `sample`."""

    NAME = "answer_judge"
    MODELS: Mapping[str, SimulatedModel] = {"simulated-answerer": people.answer, "simulated-reasoner": people.reason}
    PRETRAINING = Pretraining(steps=380, layers=3, context_tokens=512, tokens_per_step=2048, documents_per_step=44)

    def write_sample(self, directory: Path, config: Embedded) -> SamplePaths:
        """Write `questions.xlsx`; there is nothing to retrieve."""
        return SamplePaths(sample.write_sample(directory, config))

    def documents(self, seed: int, count: int) -> Iterator[str]:
        """Notes, and exercises in reading them."""
        return corpus.documents(seed, count)

    def words(self) -> list[str]:
        """Prompt, verdicts, and every wording of a fact."""
        return corpus.words()

    def characters(self) -> list[str]:
        """Those of words, names and questions."""
        return corpus.characters()


DOMAIN = AnswerJudgeDomain()
