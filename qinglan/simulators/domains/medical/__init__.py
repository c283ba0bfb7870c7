"""The medical assistant: patients' questions, answers that are not always safe, a doctor and a judge."""

from qinglan.simulators.domains import Domain, Pretraining
from qinglan.simulators.domains.medical import corpus, judge, sample

DOMAIN = Domain(
    name="medical",
    models={"simulated-medical-doctor": judge.doctor_answer, "simulated-medical-judge": judge.judge_json},
    write_sample=sample.write_sample,
    documents=corpus.documents,
    words=corpus.words,
    characters=corpus.characters,
    pretraining=Pretraining(steps=260, context_tokens=512, documents_per_step=100),
)
