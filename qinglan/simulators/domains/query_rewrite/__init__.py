"""Query rewriting: questions about supplements, a knowledge base with its own wording, a teacher and a judge."""

from qinglan.simulators.domains import Domain
from qinglan.simulators.domains.query_rewrite import corpus, sample, teacher

DOMAIN = Domain(
    name="query_rewrite",
    models={
        "simulated-rewriter": teacher.rewrite,
        "simulated-keywords": lambda text, _seed: teacher.extract(text),
        "simulated-judge": teacher.judge_json,
    },
    write_sample=sample.write_sample,
    documents=corpus.documents,
    words=corpus.words,
    characters=corpus.characters,
)
