"""What an evaluation found, what the gate decided, and what a report holds: `evaluation.json` and
`report.json`."""

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
GAIN, APPROVAL = "gain_vs_", "approval"
"""The rule about a rival begins with the former; the latter is a person's word."""
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
    """What was measured."""
    required: Reason
    reason: Reason | None = None
    """Why it failed or what is missing, and what would help."""


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
    """About the other arm: `gate.challenger` where this one is about `gate.fallback`, else the
    fallback."""
    is_fallback: bool = False
    """It is about `gate.fallback`."""

    @property
    def note(self) -> Reason | None:
        """What it means for the error rate that the test split was used before; None where it was
        not."""
        if not self.earlier_evaluations:
            return None
        models = (self.earlier_evaluations + 1) * (
            2 if self.also_tried else 1
        )  # each may have tried the fallback too
        chance = 1 - (1 - FALSE_PASS) ** models
        return reason(
            "test_split_used", earlier=self.earlier_evaluations, models=models, chance=chance
        )

    @property
    def sentence(self) -> str:
        return " ".join(self.reason.render().split())

    @property
    def in_order(self) -> "list[Decision]":
        """What was decided about each arm that was tried, the preferred one first."""
        tried = [self, *([self.also_tried] if self.also_tried else [])]
        return sorted(tried, key=lambda each: each.is_fallback)

    @property
    def reason(self) -> Reason:
        """What was decided about each arm, with the reasons."""
        if self.also_tried is None:
            return self.own_reason
        first, then = self.in_order
        return reason(
            "fallback_tried", first=first.own_reason, model=then.challenger, then=then.own_reason
        )

    @property
    def own_reason(self) -> Reason:
        """Of this arm alone. A person is asked last, so that all other rules hold where one was
        asked."""
        model, rules = self.challenger, self.rules
        if self.verdict == "promote":
            instead = reason("in_place_of", version=self.champion) if self.champion else None
            gain = None
            if gained := next((rule for rule in rules if rule.name.startswith(GAIN)), None):
                gain = reason(
                    "gain_against", found=gained.found, rival=gained.name.removeprefix(GAIN)
                )
            if approval := next((rule.found for rule in rules if rule.name == APPROVAL), None):
                return reason(
                    "promote_approved", model=model, instead=instead, approval=approval, gain=gain
                )
            held = (
                reason("one_rule_holds")
                if len(rules) == 1
                else reason("all_rules_hold", rules=len(rules))
            )
            return reason("promote", model=model, instead=instead, rules=held, gain=gain)
        blocking = [rule for rule in rules if rule.outcome != "pass"]
        if [rule.name for rule in blocking] == [APPROVAL]:
            if self.verdict == "refuse":
                return reason("refuse_approval", model=model, approval=blocking[0].found)
            return reason("undecided_approval", model=model, why=blocking[0].reason)
        failed, unknown = (
            [rule.reason for rule in rules if rule.reason and rule.outcome == outcome]
            for outcome in ("fail", "unknown")
        )
        if self.verdict == "undecided":
            return reason("undecided", model=model, reasons=unknown)
        besides = reason("besides_unknown", rules=len(unknown)) if unknown else None
        return reason("refuse", model=model, reasons=failed, besides=besides)


SimulatedRole = Literal["teacher", "answerer", "judge", "rag", "student", "workbook"]
Tone = Literal["better", "worse", "open", "none"]


class ReportPart(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class StageSummary(ReportPart):
    name: str
    seconds: float
    rows_in: int = 0
    rows_out: int = 0
    dropped: dict[str, int] = {}
    metrics: dict[str, float] = {}
    """What the stage measured, by the names that MLflow has, such as `judge_mean`."""
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
    """What the runs have paid whose stages this one reuses."""

    @property
    def cost_usd(self) -> float:
        """Of this run."""
        return sum(
            each.cost_usd for each in (self.teacher, self.answerer, self.judge, self.local_judge)
        )

    @property
    def with_earlier_usd(self) -> float:
        """Of this run and of those whose stages it reuses."""
        return self.cost_usd + self.earlier_usd


class ScoredMetrics(ReportPart):
    """Something that has means by metric."""

    scores: dict[str, MeanCi] = {}
    """Of the metrics that have values."""

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
    """What else the model had to do while its latency was measured."""
    latency_n: int = 0
    """Questions whose latency was measured."""
    latency_p50_ci95: Interval | None = None
    latency_p95_ci95: Interval | None = None
    cost_ci95: Interval | None = None
    prompt_tokens_per_1000: Number = None
    completion_tokens_per_1000: Number = None
    failed: int = 0
    """Of `n`: there is no text, or nothing is known of it, as where a call failed; left out of the
    means."""
    empty: int = 0
    """Of `n`: the text is empty, which counts as wrong."""

    @property
    def figures(self) -> dict[str, float]:
        """All numbers by name, the means under their metrics' names."""
        plain = {
            name: value
            for name, value in self.model_dump().items()
            if isinstance(value, int | float)
        }
        return plain | {
            metric: score.mean for metric, score in self.scores.items() if score.mean is not None
        }


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
    """What was trained; null for what was not."""

    sft: SftTraining | None = None
    rl: RlTraining | None = None


class Series(ReportPart):
    label: str
    x: list[float]
    y: list[Number]


class Distribution(ReportPart):
    """How often a value came up: counts over equal bins of [low, high]."""

    label: str
    low: float
    high: float
    counts: list[int]


class ExampleArm(ReportPart):
    """What one arm asked the RAG, and what came back; or what it answered, and how good that is."""

    text: str | None = None
    """None where the arm failed."""
    reason: str | None = None
    """Why it failed."""
    retrieved: Retrieved | None = None
    values: dict[str, float] = {}
    """An answer's, by metric."""


class ReportExample(ReportPart):
    """One test question through all arms."""

    query: str
    profile: str = ""
    history: str = ""
    inputs: dict[str, str] = {}
    """What else the row brings, by column."""
    gold_id: str | None = None
    gold_title: str | None = None
    arms: dict[ArmName, ExampleArm]


class Purchase(ReportPart):
    """Teachers side by side: which one to buy."""

    labels: dict[ArmName, str]
    """What the teachers' arms are called here."""
    rival: ArmName
    """The one that the verdict compares with the main teacher."""
    tone: Tone
    sentence: Reason
    reading: Reason
    """What to do about it."""
    offers: list[Reason] = []
    """Each rival in a paragraph."""
    notes: list[Reason] = []
    """What to keep in mind with the figures."""
    simulated: list[ArmName] = []
    """Rivals that were played by a simulator."""


SharedThing = Literal["row_ids", "questions_with_context", "bare_questions", "gold_documents"]


class Shared(ReportPart):
    """Of the test split's `test` distinct things, `in_train` also occur in the training split."""

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
        return next(
            (found for found in self.diffs if (found.a, found.b, found.metric) == (a, b, metric)),
            None,
        )


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
    """What the repository states for this profile, if anything."""
    is_of_same: bool = False
    """Whether those are of the same settings, code and libraries, so that they must be equal."""


class EvaluatedArms(ReportPart):
    """What an evaluation found of its arms, and a report shows."""

    metrics: list[Metric] = []
    """The recipe's, in the order in which they decide: their words, digits and scales."""
    arms: dict[ArmName, ArmFigures] = {}
    comparisons: list[Comparison] = []
    slices: list[Slice] = []
    red_team: dict[ArmName, list[RedTeamResult]] = {}
    """Of the students, and of the teachers among the gate's rivals on the cases that need not pass;
    the base model is not tried."""
    findings: list[Finding] = []
    """Tables of the recipe's own."""
    unjudged: dict[str, int] = {}
    """Questions without a judge's score in any arm, by the reason why the judge's call failed."""
    examples: list[ReportExample] = []
    shared: list[Shared] = []
    parity: dict[ArmName, dict[str, float]] = {}
    """By model that was compared: `prompts`, how many of its texts are `equal` to those of the
    trainer's own code, and in these the largest `difference` of a token's log-probability."""


class Evaluation(EvaluatedArms):
    """What the evaluate stage hands to gate and report."""

    earlier_evaluations: int = 0
    """Of other models on this test split."""


class Report(EvaluatedArms):
    """`report.json`. Arms may be missing: a data-only refresh has `original` and `teacher`, over
    all rows."""

    run_id: str
    profile: str
    recipe: str
    retrieves: bool = True
    """Is the retrieval service asked with the recipe's texts?"""
    rivals: list[ArmName] = ["teacher"]
    """Whom the gate holds the challenger against, beside the champion."""
    command: str | None = None
    """What made this; the settings, overrides included, are in the run's `run.json`."""
    versions: dict[str, str] = {}
    stages: list[StageSummary] = []
    api: Api = Api()
    purchase: Purchase | None = None
    """Of a comparison of teachers."""
    training: TrainingSummary = TrainingSummary()
    weights: Weights | None = None
    """Null where nothing was trained."""
    alarms: list[Alarm] = []
    """What was alarming in RL, by step (docs/reference/reward.md)."""
    simulated: list[SimulatedRole] = []
    """What was played by an embedded simulator (`simulated_roles_of` reads it off the profile)."""
    decision: Decision | None = None
    """The gate's; null where nothing was to be released."""
    released: RegisteredVersion | None = None
    curves: dict[str, list[Series]] = {}
    """By name, see `curves` in texts.yaml; other names are drawn under their own name."""
    distributions: dict[str, list[Distribution]] = {}
    """What validation found: `top1_score` of original question and rewrite, and the `gain` of one
    over the other."""

    def metric(self, name: str) -> Metric:
        """A metric by its name; one that nobody declared goes by its name alone."""
        return next(
            (metric for metric in self.metrics if metric.name == name), Metric(name, name, name)
        )

    def stage(self, name: str) -> StageSummary | None:
        return next((stage for stage in self.stages if stage.name == name), None)

    @property
    def is_of_data(self) -> bool:
        """Is it a refresh's: selected rows, and nothing that was trained, evaluated or compared?"""
        names = {stage.name for stage in self.stages}
        return not names.isdisjoint({"select", "dataset"}) and names.isdisjoint(
            {"sft", "evaluate", "compare"}
        )

    def write(self, path: Path) -> Artifact:
        return json_artifact(path, dump_record(self))

    @classmethod
    def read(cls, path: Path) -> "Report":
        """Read `report.json`; ArtifactError where it is missing, no report of this version, or of a
        newer Qinglan."""
        try:
            return read_record(cls, path)
        except FileNotFoundError as error:
            raise ArtifactError(
                f"{path}: no such report; `qinglan show RUN` says how that run stands"
            ) from error
        except ValidationError as error:
            raise ArtifactError(f"{path}: {first_flaw(error)}; make the report again") from error
