"""The answer judge: reference answers, a weak model with six kinds of answers, and a strong model that judges them."""

from qinglan.simulators.domains import Domain, Pretraining
from qinglan.simulators.domains.answer_judge import corpus, models, sample

DOMAIN = Domain(
    name="answer_judge",
    models={"simulated-answerer": models.answer, "simulated-reasoner": models.reason},
    write_sample=sample.write_sample,
    documents=corpus.documents,
    words=corpus.words,
    characters=corpus.characters,
    pretraining=Pretraining(steps=380, layers=3, context_tokens=512, tokens_per_step=2048, documents_per_step=44),
)
