"""What a run found: `report.json` as models, and the verdict. `report_html` and `report_terminal` show it."""

from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from qinglan.alarms import Alarm
from qinglan.artifacts import Artifact, StageResult, write_json
from qinglan.config import EMBEDDED, Profile
from qinglan.errors import ArtifactError
from qinglan.formats import capitalised, count, number, signed, with_interval
from qinglan.ledger import Usage
from qinglan.rows import Retrieved
from qinglan.statistics import Comparison, Interval

ArmName = str
"""One of `ARMS`, or the name of a teacher in the profile's `compare`."""
StandIn = Literal["teacher", "judge", "rag", "student", "workbook"]
Tone = Literal["better", "worse", "open", "none"]

ARMS: dict[ArmName, str] = {
    "original": "original question",
    "teacher": "teacher",
    "base": "base model",
    "sft": "SFT student",
    "rl": "RL student",
}
ARM_HEADS: dict[ArmName, str] = {
    "original": "Original",
    "teacher": "Teacher",
    "base": "Base",
    "sft": "SFT",
    "rl": "RL",
}
METRICS = {
    "top1": "top-1",
    "mrr10": "MRR@10",
    "quality": "judge score (0–5)",
    "mean_top1_score": "mean top-1 score",
}
"""In the order of preference for the headline: the gold document first."""
STAND_INS: dict[StandIn, str] = {
    "teacher": "the teacher",
    "judge": "the judge",
    "rag": "the RAG",
    "student": "the base model",
    "workbook": "the workbook",
}
_HEADLINE_PAIRS = (("rl", "teacher"), ("sft", "teacher"), ("teacher", "original"))
_STUDENTS = ("base", "sft", "rl")


def _no_nan(value: Any) -> Any:
    return None if isinstance(value, float) and value != value else value


Number = Annotated[float | None, BeforeValidator(_no_nan)]
"""Null where there is no value; NaN, which JSON can't carry, becomes null."""


class Part(BaseModel):
    """A part of the report."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class StageArtifact(Part):
    """A file that a stage left behind."""

    path: str
    sha256: str
    rows: int | None = None


class Stage(Part):
    """What a stage took in and gave out."""

    name: str
    seconds: float
    rows_in: int = 0
    rows_out: int = 0
    dropped: dict[str, int] = {}
    artifacts: list[StageArtifact] = []
    reused_from: str | None = None
    """The run that did the work, where it was not this one."""

    @classmethod
    def of(cls, result: StageResult, run_id: str) -> "Stage":
        """A finished stage as the report shows it."""
        return cls(
            name=result.stage,
            seconds=result.seconds,
            rows_in=result.rows_in,
            rows_out=result.rows_out,
            dropped=result.dropped,
            artifacts=[
                StageArtifact(path=str(a.path), sha256=a.sha256, rows=a.rows) for a in result.artifacts.values()
            ],
            reused_from=result.run_id if result.run_id != run_id else None,
        )


class RagCalls(Part):
    """Use of the retrieval service."""

    calls: int = 0
    cached: int = 0
    failed: int = 0


class Api(Part):
    """Calls by role."""

    teacher: Usage = Usage()
    judge: Usage = Usage()
    rag: RagCalls = RagCalls()


class Arm(Part):
    """One way to get a query, and how well it retrieves."""

    n: int
    """Questions put to this arm."""
    top1: Number = None
    """Share of labelled questions whose gold document comes first; null where none is labelled."""
    mrr10: Number = None
    mean_top1_score: Number = None
    """Mean reranker score of the first passage."""
    quality: Number = None
    """Mean judge score, 0–5; null where unjudged."""
    latency_p50_ms: Number = None
    latency_p95_ms: Number = None
    cost_per_1000_usd: Number = None
    top1_ci95: Interval | None = None
    failed: int = 0
    """Of `n`: no usable query or no retrieval; left out of the means."""


class SftTraining(Part):
    """Summary of supervised fine-tuning; further keys are shown as they are."""

    model_config = ConfigDict(extra="allow")

    rows: int | None = None
    steps: int | None = None
    loss_first: Number = None
    loss_last: Number = None


class RlTraining(Part):
    """Summary of reinforcement learning; further keys are shown as they are."""

    model_config = ConfigDict(extra="allow")

    steps: int
    reward_first: Number = None
    reward_last: Number = None


class Training(Part):
    """What was trained; null for what was not."""

    sft: SftTraining | None = None
    rl: RlTraining | None = None


class Series(Part):
    """One curve."""

    label: str
    x: list[float]
    y: list[Number]


class Distribution(Part):
    """How often a value came up: counts over equal bins of [low, high]."""

    label: str
    low: float
    high: float
    counts: list[int]


class ExampleArm(Part):
    """What one arm asked the RAG, and what came back."""

    text: str | None = None
    """The query sent; None where the arm failed."""
    reason: str | None = None
    """Why it failed."""
    retrieved: Retrieved | None = None


class Example(Part):
    """One test question through all arms."""

    query: str
    profile: str = ""
    history: str = ""
    gold_id: str | None = None
    gold_title: str | None = None
    arms: dict[ArmName, ExampleArm]


class Purchase(Part):
    """Teachers side by side: which one to buy."""

    labels: dict[ArmName, str]
    """What the teachers' arms are called here."""
    rival: ArmName
    """The one that the verdict compares with the main teacher."""
    tone: Tone
    sentence: str
    reading: str
    offers: list[str] = []
    """Each rival in a paragraph."""
    notes: list[str] = []
    """What to keep in mind with the figures."""
    stand_ins: list[ArmName] = []
    """Rivals that were played by a stand-in."""


class Shared(Part):
    """Of the test split's `test` distinct things, `in_train` also occur in the training split."""

    what: str
    """Such as `gold documents`, `exact questions`, `products`."""
    test: int
    in_train: int
    note: str = ""


class Report(Part):
    """`report.json`. Arms may be missing: a data-only refresh has `original` and `teacher`, over all rows."""

    run_id: str
    profile: str
    recipe: str
    versions: dict[str, str] = {}
    stages: list[Stage] = []
    api: Api = Api()
    arms: dict[ArmName, Arm] = {}
    comparisons: list[Comparison] = []
    purchase: Purchase | None = None
    """Of a comparison of teachers."""
    training: Training = Training()
    alarms: list[Alarm] = []
    """What was alarming in RL, by step (docs/alarms.md)."""
    stand_ins: list[StandIn] = []
    """What was played by an embedded stand-in (`stand_ins_of` reads it off the profile)."""
    examples: list[Example] = []
    shared: list[Shared] = []
    curves: dict[str, list[Series]] = {}
    """By name, see `report_html.CURVES`; other names are drawn under their own name."""
    distributions: dict[str, list[Distribution]] = {}
    """What validation found: `top1_score` of original question and rewrite, and the `gain` of one over the other."""

    def write(self, path: Path) -> Artifact:
        """Write `report.json`."""
        write_json(path, self.model_dump(mode="json"))
        return Artifact.of(path)

    @classmethod
    def read(cls, path: Path) -> "Report":
        """Read `report.json` back.

        Raises:
            ArtifactError: missing, or not a report of this version.
        """
        try:
            return cls.model_validate_json(path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise ArtifactError(f"{path}: no such report; run `evaluate` first") from error
        except ValidationError as error:
            problem = error.errors()[0]
            where = ".".join(map(str, problem["loc"]))
            raise ArtifactError(f"{path}: `{where}`: {problem['msg']}; make the report again") from error


class Verdict(NamedTuple):
    """The run's result in a sentence, and how to read it."""

    tone: Tone
    sentence: str
    reading: str


def stand_ins_of(profile: Profile) -> list[StandIn]:
    """What the embedded stand-ins play under this profile."""
    places: dict[StandIn, str] = {
        "teacher": profile.teacher.base_url,
        "judge": profile.judge.base_url,
        "rag": profile.rag.url,
        "student": profile.student.base_model,
        "workbook": "" if profile.data.sql else profile.data.workbook,
    }
    return [role for role, place in places.items() if place == EMBEDDED]


def verdict(report: Report) -> Verdict:
    """The headline: which teacher to buy, or the furthest student against the teacher on the best metric there is."""
    if report.purchase:
        return Verdict(report.purchase.tone, report.purchase.sentence, report.purchase.reading)
    found = headline(report)
    if found is None or found.diff is None:
        return Verdict("none", "Nothing was compared in this run.", "No two arms have values for the same questions.")
    a, b = arm_label(found.a), arm_label(found.b)
    questions = "test questions" if any(arm in report.arms for arm in _STUDENTS) else "questions"
    sentence = (
        f"{capitalised(a)} {number(found.mean_a)} vs {b} {number(found.mean_b)} {metric_label(found.metric)} "
        f"on {count(found.n)} {questions}: {with_interval(found.diff, found.ci95, signed)}"
    )
    return Verdict(_tone(found), sentence, _reading(found, a, b))


def stand_in_warning(report: Report) -> str:
    """What the numbers can't say, or nothing where everything was real."""
    if not report.stand_ins:
        return ""
    *first, last = (STAND_INS[role] for role in report.stand_ins)
    names = f"{', '.join(first)} and {last}" if first else last
    verb = "were embedded stand-ins" if first else "was an embedded stand-in"
    about = "GPT-5 or your data" if "teacher" in report.stand_ins else "your own service or data"
    return f"{capitalised(names)} {verb}. The numbers marked * say that the machinery works, nothing about {about}."


def alarm_warning(report: Report) -> str:
    """Which alarms sounded in RL, or nothing where none did."""
    steps: dict[str, list[str]] = {}
    for alarm in report.alarms:
        steps.setdefault(alarm.name, []).append(str(alarm.step))
    named = [f"{name} (step {', '.join(at)})" for name, at in steps.items()]
    return f"RL training sounded alarms: {', '.join(named)}. See docs/alarms.md." if named else ""


def starred(report: Report, key: str) -> bool:
    """Whether an arm's or a metric's numbers come from a stand-in; a student learnt from its teacher and its RAG."""
    sources: dict[str, set[StandIn]] = {
        "original": {"workbook"},
        "teacher": {"workbook", "teacher"},
        "base": {"workbook", "student"},
        "sft": set(STAND_INS),
        "rl": set(STAND_INS),
        "quality": {"workbook", "judge"},
    }
    if report.purchase and key in report.purchase.labels and key != "teacher":
        return key in report.purchase.stand_ins
    return not sources.get(key, {"workbook", "rag"}).isdisjoint(report.stand_ins)


def arms_of(report: Report) -> dict[ArmName, Arm]:
    """The report's arms, in the order in which they are shown."""
    return {name: report.arms[name] for name in sorted(report.arms, key=lambda name: [*ARMS, name].index(name))}


def arm_label(name: str, report: Report | None = None) -> str:
    """An arm's name in a sentence."""
    own = report.purchase.labels if report and report.purchase else {}
    return own.get(name) or ARMS.get(name, name)


def arm_head(name: str, report: Report | None = None) -> str:
    """An arm's name at the head of a column."""
    own = report.purchase.labels if report and report.purchase else {}
    return own.get(name) or ARM_HEADS.get(name, name)


def pair(comparison: Comparison, report: Report | None = None) -> str:
    """`RL − Teacher`."""
    return f"{arm_head(comparison.a, report)} − {arm_head(comparison.b, report)}"


def metric_label(name: str) -> str:
    """A metric's name in a sentence."""
    return METRICS.get(name, name)


def headline(report: Report) -> Comparison | None:
    """The comparison that the verdict speaks of."""
    usable = {(c.a, c.b, c.metric): c for c in report.comparisons if c.diff is not None}
    pairs = ((report.purchase.rival, "teacher"),) if report.purchase else _HEADLINE_PAIRS
    keys = ((*pair, metric) for pair in pairs for metric in METRICS)
    return next((usable[key] for key in keys if key in usable), None)


def _tone(found: Comparison) -> Literal["better", "worse", "open"]:
    if found.ci95 is None or found.ci95[0] <= 0 <= found.ci95[1]:
        return "open"
    return "better" if found.ci95[0] > 0 else "worse"


def _reading(found: Comparison, a: str, b: str) -> str:
    if found.ci95 is None:
        return "All questions belong to one group, so that no interval can be given."
    detects = f" This test set can detect {number(found.detectable_diff)}." if found.detectable_diff else ""
    return {
        "better": f"The 95% interval lies above 0: the {a} is better than the {b} on questions like these.",
        "worse": f"The 95% interval lies below 0: the {a} is worse than the {b} on questions like these.",
        "open": f"The 95% interval includes 0: no difference is shown.{detects}",
    }[_tone(found)]
