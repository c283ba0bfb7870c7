"""The world of query rewriting: questions about supplements, a knowledge base in its own wording, and a teacher."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from qinglan.config import Embedded
from qinglan.simulators.domains import Domain, SamplePaths, SimulatedModel
from qinglan.simulators.domains.query_rewrite import corpus, sample, teacher


class QueryRewriteDomain(Domain):
    """Wraps `domain`, `sample`, `corpus`, `reader` and `teacher`."""

    NAME = "query_rewrite"
    MODELS: Mapping[str, SimulatedModel] = {
        "simulated-rewriter": teacher.rewrite,
        "simulated-keywords": lambda text, _seed: teacher.extract(text),
        "simulated-judge": teacher.say_verdict,
    }

    def write_sample(self, directory: Path, config: Embedded) -> SamplePaths:
        """Write `questions.xlsx` and `kb.jsonl`."""
        return sample.write_sample(directory, config)

    def documents(self, seed: int, count: int) -> Iterator[str]:
        """Passages, names and topics."""
        return corpus.documents(seed, count)

    def words(self) -> list[str]:
        """Prompts, products and the accepted words of every intent."""
        return corpus.words()

    def characters(self) -> list[str]:
        """Those that names, questions and passages are written in."""
        return corpus.characters()


DOMAIN = QueryRewriteDomain()
