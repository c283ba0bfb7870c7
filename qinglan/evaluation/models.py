"""Data of an evaluation, of the gate's decision and of a report.

They are written as `evaluation.json` and `report.json`.
"""

from datetime import datetime
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from qinglan.errors import ArtifactError
from qinglan.evaluation.reasons import Reason, reason
from qinglan.evaluation.red_team import RedTeamResult
from qinglan.ledger import Usage
from qinglan.recipes import Finding, Metric
from qinglan.rows import ArmName, Retrieved
from qinglan.runs.artifacts import Artifact, StageResult, json_artifact
from qinglan.runs.schema_version import dump_record, first_flaw, read_record
from qinglan.statistics import Comparison, Interval, MeanCi, Number
from qinglan.training.alarms import Alarm

Verdict = Literal["promote", "refuse", "undecided"]
Outcome = Literal["pass", "fail", "unknown"]
GAIN = "gain_vs_"
"""Names of rules about the gain over a rival begin so."""
APPROVAL = "approval"
"""Name of the rule that a person must have approved the release."""
FALSE_PASS = 0.025
"""The chance that a model which is no better passes the rule about the gain: one side of a 95%
interval."""


class Rule(BaseModel, frozen=True, extra="forbid"):
    """One requirement and how it came out."""

    name: str
    """Such as `gain_vs_teacher`, `quality_vs_champion`, `cost`, `latency`, `red_team`,
    `robustness_vs_teacher`, `alarms`."""
    outcome: Outcome
    """`unknown` where the test set can't tell, or what the rule needs was not measured; it blocks
    like a failure, and says so. Only the teacher's latency may be missing: then there is nothing to
    be slower than."""
    found: Reason
    """The measured figures."""
    required: Reason
    reason: Reason | None = None
    """Cause of a failure, or what is missing, and what would help."""


class Decision(BaseModel, frozen=True, extra="forbid"):
    """The gate's answer, for `report.json`, MLflow and Prefect."""

    verdict: Verdict
    """`undecided`: nothing failed, but something is unknown."""
    challenger: str
    """The arm."""
    champion: str | None = None
    """Version of the registered model that is to be replaced, if there is one."""
    rules: list[Rule]
    earlier_evaluations: int = 0
    """Evaluations of other models on this test split before this one."""
    also_tried: "Decision | None" = None
    """The decision about the second arm: `gate.challenger` where this one is about
    `gate.fallback`, otherwise the fallback."""
    is_fallback: bool = False
    """True where the decision is about `gate.fallback`."""

    @property
    def note(self) -> Reason | None:
        """The effect on the error rate of earlier uses of the test split; None without any."""
        if not self.earlier_evaluations:
            return None
        models = self.earlier_evaluations + 1
        if self.also_tried:
            # Each earlier evaluation may have tried the fallback, too.
            models *= 2
        chance = 1 - (1 - FALSE_PASS) ** models
        return reason(
            "test_split_used", earlier=self.earlier_evaluations, models=models, chance=chance
        )

    @property
    def sentence(self) -> str:
        """`reason` on one line, in English."""
        return " ".join(self.reason.render().split())

    @property
    def in_order(self) -> "list[Decision]":
        """The decisions about all arms that were tried, the preferred arm's first."""
        decisions = [self]
        if self.also_tried:
            decisions.append(self.also_tried)
        # False comes before True.
        return sorted(decisions, key=lambda decision: decision.is_fallback)

    @property
    def reason(self) -> Reason:
        """The decision about each arm that was tried, with the causes."""
        if self.also_tried is None:
            return self.own_reason
        first, then = self.in_order
        return reason(
            "fallback_tried", first=first.own_reason, model=then.challenger, then=then.own_reason
        )

    @property
    def own_reason(self) -> Reason:
        """The decision about this arm alone, with the causes."""
        if self.verdict == "promote":
            return self._reason_to_promote()
        blocking = [rule for rule in self.rules if rule.outcome != "pass"]
        # A person is asked last, so all other rules hold where one was asked.
        if [rule.name for rule in blocking] == [APPROVAL]:
            approval = blocking[0]
            if self.verdict == "refuse":
                return reason("refuse_approval", model=self.challenger, approval=approval.found)
            return reason("undecided_approval", model=self.challenger, why=approval.reason)
        unknown = self._reasons_of("unknown")
        if self.verdict == "undecided":
            return reason("undecided", model=self.challenger, reasons=unknown)
        besides = reason("besides_unknown", rules=len(unknown)) if unknown else None
        failed = self._reasons_of("fail")
        return reason("refuse", model=self.challenger, reasons=failed, besides=besides)

    def _reason_to_promote(self) -> Reason:
        # The first model that is released replaces none.
        instead = reason("in_place_of", version=self.champion) if self.champion else None
        gain = None
        # The sentence names the gain over the first rival alone.
        for rule in self.rules:
            if rule.name.startswith(GAIN):
                rival = rule.name.removeprefix(GAIN)
                gain = reason("gain_against", found=rule.found, rival=rival)
                break
        for rule in self.rules:
            if rule.name == APPROVAL:
                return reason(
                    "promote_approved",
                    model=self.challenger,
                    instead=instead,
                    approval=rule.found,
                    gain=gain,
                )
        if len(self.rules) == 1:
            rules = reason("one_rule_holds")
        else:
            rules = reason("all_rules_hold", rules=len(self.rules))
        return reason("promote", model=self.challenger, instead=instead, rules=rules, gain=gain)

    def _reasons_of(self, outcome: Outcome) -> list[Reason]:
        """The reasons of the rules that came out so."""
        return [rule.reason for rule in self.rules if rule.reason and rule.outcome == outcome]


SimulatedRole = Literal["teacher", "answerer", "judge", "rag", "student", "workbook"]
Tone = Literal["better", "worse", "open", "none"]


class ReportPart(BaseModel):
    """A part of an evaluation or a report."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class StageSummary(ReportPart):
    """A stage's work: its time, its rows, and what it measured."""

    name: str
    seconds: float
    rows_in: int = 0
    rows_out: int = 0
    dropped: dict[str, int] = {}
    metrics: dict[str, float] = {}
    """The stage's measurements, by the names that MLflow has, such as `judge_mean`."""
    artifacts: list[Artifact] = []
    reused_from: str | None = None
    """The run that did the work, where it was not this one."""
    continued_anyway: list[str] = []
    """The code that changed while a training was interrupted, where `--continue-anyway` continued
    it all the same."""

    @classmethod
    def of(cls, result: StageResult, run_id: str) -> "StageSummary":
        return cls(
            **result.model_dump(include={"seconds", "rows_in", "rows_out", "dropped", "metrics"}),
            name=result.stage,
            artifacts=list(result.artifacts.values()),
            reused_from=result.run_id if result.run_id != run_id else None,
            continued_anyway=result.details.get("continued_anyway", []),
        )


class RagCalls(ReportPart):
    """Calls of the retrieval service."""

    calls: int = 0
    cached: int = 0
    failed: int = 0


class Api(ReportPart):
    """Calls by role."""

    teacher: Usage = Usage()
    answerer: Usage = Usage()
    """The model whose answers the student learns to judge, where a recipe has one."""
    judge: Usage = Usage()
    local_judge: Usage = Usage()
    """`judge.local`, which scored RL's samples."""
    rag: RagCalls = RagCalls()
    earlier_usd: float = 0.0
    """Costs of the runs whose stages this one reuses."""

    @property
    def cost_usd(self) -> float:
        """This run's cost."""
        # A call of the RAG has no price.
        paid = (self.teacher, self.answerer, self.judge, self.local_judge)
        return sum(usage.cost_usd for usage in paid)

    @property
    def with_earlier_usd(self) -> float:
        """Cost of this run and of the runs whose stages it reuses."""
        return self.cost_usd + self.earlier_usd


class ScoredMetrics(ReportPart):
    """Something that has means by metric."""

    scores: dict[str, MeanCi] = {}
    """Mean of each metric that has values, by its name."""

    def score(self, metric: str) -> MeanCi:
        return self.scores.get(metric, MeanCi())

    def mean(self, metric: str) -> float | None:
        return self.score(metric).mean


class ArmFigures(ScoredMetrics):
    """One way to get a text, and how good its texts are."""

    n: int
    """Questions put to this arm."""
    latency_p50_ms: Number = None
    latency_p95_ms: Number = None
    cost_per_1000_usd: Number = None
    judge_consistency: Number = None
    """Mean difference between the judge's two passes, 0–5; null where it was asked once."""
    latency_load: Reason | None = None
    """The model's other work while its latency was measured."""
    latency_n: int = 0
    """Questions whose latency was measured."""
    latency_p50_ci95: Interval | None = None
    latency_p95_ci95: Interval | None = None
    cost_ci95: Interval | None = None
    prompt_tokens_per_1000: Number = None
    completion_tokens_per_1000: Number = None
    failed: int = 0
    """Questions of `n` without a text, or with one of which nothing is known, as where a call
    failed; left out of the means."""
    empty: int = 0
    """Questions of `n` with an empty text, which counts as wrong."""

    @property
    def figures(self) -> dict[str, float]:
        """All numbers by name, the means under their metrics' names."""
        figures: dict[str, float] = {}
        # Intervals and the load are no numbers.
        for name, value in self.model_dump().items():
            if isinstance(value, int | float):
                figures[name] = value
        for metric, score in self.scores.items():
            if score.mean is not None:
                figures[metric] = score.mean
        return figures

    def with_cost(self, cost_per_1000_usd: float | None, ci95: Interval | None) -> "ArmFigures":
        return self.model_copy(update={"cost_per_1000_usd": cost_per_1000_usd, "cost_ci95": ci95})


class SftTraining(ReportPart, extra="allow"):
    """Summary of supervised fine-tuning; further keys are shown as they are."""

    rows: int | None = None
    steps: int | None = None


class RlTraining(ReportPart, extra="allow"):
    """Summary of reinforcement learning; further keys are shown as they are."""

    steps: int
    reward_first: Number = None
    reward_last: Number = None


class TrainingSummary(ReportPart):
    """The trainings of a run; null for one that was not done."""

    sft: SftTraining | None = None
    rl: RlTraining | None = None


class Series(ReportPart):
    """The points of a curve."""

    label: str
    x: list[float]
    y: list[Number]


class Distribution(ReportPart):
    """Frequencies of a value: counts over equal bins of [low, high]."""

    label: str
    low: float
    high: float
    counts: list[int]


class ExampleArm(ReportPart):
    """One arm's text for a question.

    A rewrite comes with what the RAG returned for it, an answer with its values.
    """

    text: str | None = None
    """None where the arm failed."""
    reason: str | None = None
    """Cause of the failure."""
    retrieved: Retrieved | None = None
    values: dict[str, float] = {}
    """Value of an answer, by metric."""


class ReportExample(ReportPart):
    """One test question through all arms."""

    query: str
    profile: str = ""
    history: str = ""
    inputs: dict[str, str] = {}
    """The row's further inputs, by column."""
    gold_id: str | None = None
    gold_title: str | None = None
    arms: dict[ArmName, ExampleArm]


class Purchase(ReportPart):
    """Teachers side by side: which one to buy."""

    labels: dict[ArmName, str]
    """Names of the teachers' arms in the report."""
    rival: ArmName
    """The rival that the verdict compares with the main teacher."""
    tone: Tone
    sentence: Reason
    reading: Reason
    """Advice: what to do about the result."""
    offers: list[Reason] = []
    """A paragraph about each rival."""
    notes: list[Reason] = []
    """Caveats about the figures."""
    simulated: list[ArmName] = []
    """Rivals that were played by a simulator."""


SharedThing = Literal["row_ids", "questions_with_context", "bare_questions", "gold_documents"]


class Shared(ReportPart):
    """Overlap of the splits: `in_train` of the test split's `test` distinct things are also in the
    training split."""

    what: SharedThing
    test: int
    in_train: int


class SliceArm(ScoredMetrics):
    """One arm on the questions of a slice; a small slice has no intervals."""

    n: int = 0
    """Questions for which this arm has a value."""


class SliceDiff(ReportPart):
    """`a` − `b` on the questions of a slice where both have a value."""

    a: ArmName
    b: ArmName
    metric: str
    n: int
    diff: Number = None
    ci95: Interval | None = None
    """None for fewer than two groups, and in a small slice."""


class Slice(ReportPart):
    """The test questions that have something in common."""

    by: str
    """`tenant`, `intent`, `length`, `history` or `pool`."""
    value: str
    n: int
    arms: dict[ArmName, SliceArm] = {}
    diffs: list[SliceDiff] = []

    def diff(self, a: ArmName, b: ArmName, metric: str) -> SliceDiff | None:
        for diff in self.diffs:
            if (diff.a, diff.b, diff.metric) == (a, b, metric):
                return diff
        return None


class RegisteredVersion(ReportPart, from_attributes=True, extra="ignore"):
    """The version under which MLflow's registry keeps the challenger; made from a
    `registry.Released`."""

    name: str
    version: str
    aliases: list[str] = []
    arm: ArmName = ""
    sha256: str = ""
    recipe_version: str = ""
    dataset_version: str | None = None
    mlflow_run_id: str | None = None
    created: datetime | str | None = None


class Weights(ReportPart):
    """Digests of the trained models' weights, by stage."""

    made_of: str
    """Digest of the settings, code and libraries that they depend on."""
    found: dict[str, str]
    expected: dict[str, str] = {}
    """The digests that the repository states for this profile, if any."""
    is_of_same: bool = False
    """True where the expected digests come from the same settings, code and libraries, so that they
    must be equal."""


class EvaluatedArms(ReportPart):
    """The results of an evaluation's arms, which a report shows."""

    metrics: list[Metric] = []
    """The recipe's, in the order in which they decide: their words, digits and scales."""
    arms: dict[ArmName, ArmFigures] = {}
    comparisons: list[Comparison] = []
    slices: list[Slice] = []
    red_team: dict[ArmName, list[RedTeamResult]] = {}
    """Results of the students, and of the teachers among the gate's rivals on the cases that need
    not pass; the base model is not tried."""
    findings: list[Finding] = []
    """Tables of the recipe's own."""
    unjudged: dict[str, int] = {}
    """Questions without a judge's score in any arm, by the reason why the judge's call failed."""
    examples: list[ReportExample] = []
    shared: list[Shared] = []
    parity: dict[ArmName, dict[str, float]] = {}
    """Comparison of a student's texts with those of the trainer's own code: the number of
    `prompts`, the number of `equal` texts, and in these the largest `difference` of a token's
    log-probability."""

    def arm(self, name: ArmName) -> ArmFigures:
        """An arm's figures; all are unknown where there is no such arm."""
        return self.arms.get(name, ArmFigures(n=0))


class Evaluation(EvaluatedArms):
    """The result of the evaluate stage, for gate and report."""

    earlier_evaluations: int = 0
    """Evaluations of other models on this test split before this one."""

    def with_comparisons(self, comparisons: list[Comparison]) -> "Evaluation":
        return self.model_copy(update={"comparisons": comparisons})

    def with_red_team(self, red_team: dict[ArmName, list[RedTeamResult]]) -> "Evaluation":
        return self.model_copy(update={"red_team": red_team})


class Report(EvaluatedArms):
    """`report.json`.

    Arms may be missing: a data-only refresh has `original` and `teacher`, over all rows.
    """

    run_id: str
    profile: str
    recipe: str
    retrieves: bool = True
    """True where the retrieval service is asked with the recipe's texts."""
    rivals: list[ArmName] = ["teacher"]
    """Arms that the gate holds the challenger against, beside the champion."""
    command: str | None = None
    """The command of the run; its settings, overrides included, are in the run's `run.json`."""
    versions: dict[str, str] = {}
    stages: list[StageSummary] = []
    api: Api = Api()
    purchase: Purchase | None = None
    """Result of a comparison of teachers; null for other runs."""
    training: TrainingSummary = TrainingSummary()
    weights: Weights | None = None
    """Null where nothing was trained."""
    alarms: list[Alarm] = []
    """Alarms of RL, by step (docs/reference/reward.md)."""
    simulated: list[SimulatedRole] = []
    """Roles played by an embedded simulator (`simulated_roles_of` reads them off the profile)."""
    decision: Decision | None = None
    """The gate's decision; null where nothing was to be released."""
    released: RegisteredVersion | None = None
    curves: dict[str, list[Series]] = {}
    """Curves by name: texts.yaml has the titles in `curves`, a further one has its name as
    title."""
    distributions: dict[str, list[Distribution]] = {}
    """Results of validation: `top1_score` of original question and rewrite, and the `gain` of one
    over the other."""

    def metric(self, name: str) -> Metric:
        """A metric by its name; one that nobody declared goes by its name alone."""
        for metric in self.metrics:
            if metric.name == name:
                return metric
        return Metric(name, name, name)

    def stage(self, name: str) -> StageSummary | None:
        for stage in self.stages:
            if stage.name == name:
                return stage
        return None

    @property
    def is_of_data(self) -> bool:
        """True for a refresh's report: rows were selected, nothing was trained or compared."""
        names = {stage.name for stage in self.stages}
        has_data_stages = not names.isdisjoint({"select", "dataset"})
        return has_data_stages and names.isdisjoint({"sft", "evaluate", "compare"})

    def write(self, path: Path) -> Artifact:
        return json_artifact(path, dump_record(self))

    @classmethod
    def read(cls, path: Path) -> "Report":
        """Read `report.json`.

        Raises:
            ArtifactError: it is missing, no report of this version, or of a newer Qinglan.
        """
        try:
            return read_record(cls, path)
        except FileNotFoundError as error:
            raise ArtifactError(
                f"{path}: no such report; `qinglan show RUN` says how that run stands"
            ) from error
        except ValidationError as error:
            raise ArtifactError(f"{path}: {first_flaw(error)}; make the report again") from error
