"""What a run found: `report.json` as models, one self-contained HTML page, and a table for the terminal.

Every text that came from a workbook, a model or the RAG is untrusted: the template escapes it, and the page's
content policy allows no script and no network.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import jinja2
from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from qinglan import formats
from qinglan.artifacts import Artifact, StageResult, write_json
from qinglan.config import EMBEDDED, Profile
from qinglan.errors import ArtifactError
from qinglan.formats import count, interval, number, p_value, signed, usd
from qinglan.plots import Chart, DotPlot, chart, dot_plot
from qinglan.rows import Retrieved
from qinglan.statistics import Comparison, Interval

ArmName = Literal["original", "teacher", "base", "sft", "rl"]
StandIn = Literal["teacher", "judge", "rag", "student", "workbook"]

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
CURVES = {
    "rl_reward": ("RL: reward", "step"),
    "rl_dev": ("RL: dev split, by which the checkpoint was chosen", "step"),
    "sft_loss": ("SFT: loss", "step"),
    "pretrain_loss": ("Pretraining of the embedded base model: loss", "step"),
}
STAND_INS: dict[StandIn, str] = {
    "teacher": "the teacher",
    "judge": "the judge",
    "rag": "the RAG",
    "student": "the base model",
    "workbook": "the workbook",
}
DETECTABLE = "the smallest true difference that four of five such test sets would show"
_HEADLINE_PAIRS = (("rl", "teacher"), ("sft", "teacher"), ("teacher", "original"))
_TERMINAL_PAIRS = (("rl", "teacher"), ("sft", "teacher"), ("rl", "sft"), ("teacher", "original"))
_STUDENTS = ("base", "sft", "rl")
_TEMPLATES = Path(__file__).parent / "templates"


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


class PaidCalls(Part):
    """Use of a model's API; `cached` answers came from the ledger and cost nothing."""

    calls: int = 0
    cached: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost_usd: float = 0.0


class RagCalls(Part):
    """Use of the retrieval service."""

    calls: int = 0
    cached: int = 0
    failed: int = 0


class Api(Part):
    """Calls by role."""

    teacher: PaidCalls = PaidCalls()
    judge: PaidCalls = PaidCalls()
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
    training: Training = Training()
    stand_ins: list[StandIn] = []
    """What was played by an embedded stand-in (`stand_ins_of` reads it off the profile)."""
    examples: list[Example] = []
    shared: list[Shared] = []
    notes: list[str] = []
    curves: dict[str, list[Series]] = {}
    """By name, see `CURVES`; other names are drawn under their own name."""

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

    tone: Literal["better", "worse", "open", "none"]
    sentence: str
    reading: str


def stand_ins_of(profile: Profile) -> list[StandIn]:
    """What the embedded stand-ins play under this profile."""
    places: dict[StandIn, str] = {
        "teacher": profile.teacher.base_url,
        "judge": profile.judge.base_url,
        "rag": profile.rag.url,
        "student": profile.student.base_model,
        "workbook": profile.data.workbook,
    }
    return [role for role, place in places.items() if place == EMBEDDED]


def verdict(report: Report) -> Verdict:
    """The headline: the furthest student against the teacher on the best metric there is."""
    found = _headline(report)
    if found is None or found.diff is None:
        return Verdict("none", "Nothing was compared in this run.", "No two arms have values for the same questions.")
    a, b = arm_label(found.a), arm_label(found.b)
    questions = "test questions" if any(arm in report.arms for arm in _STUDENTS) else "questions"
    sentence = (
        f"{_capital(a)} {number(found.mean_a)} vs {b} {number(found.mean_b)} {metric_label(found.metric)} "
        f"on {count(found.n)} {questions}: {_with_interval(found.diff, found.ci95, signed)}"
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
    return f"{_capital(names)} {verb}. The numbers marked * say that the machinery works, nothing about {about}."


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
    return not sources.get(key, {"workbook", "rag"}).isdisjoint(report.stand_ins)


def arm_label(name: str) -> str:
    """An arm's name in a sentence."""
    return next((label for arm, label in ARMS.items() if arm == name), name)


def pair(comparison: Comparison) -> str:
    """`RL − Teacher`."""
    heads = {str(arm): head for arm, head in ARM_HEADS.items()}
    return f"{heads.get(comparison.a, comparison.a)} − {heads.get(comparison.b, comparison.b)}"


def metric_label(name: str) -> str:
    """A metric's name in a sentence."""
    return METRICS.get(name, name)


def print_table(report: Report) -> RenderableType:
    """The result for a terminal of 100 columns: headline, arms, comparisons, and what came from stand-ins."""
    result = verdict(report)
    style = {"better": "bold green", "worse": "bold red"}.get(result.tone, "bold")
    parts: list[RenderableType] = [Text(result.sentence, style), Text(result.reading, "dim")]
    parts += [_arms_table(report), _comparisons_table(report)] if report.arms else []
    if failed := [f"{arm_label(name)} {arm.failed}" for name, arm in report.arms.items() if arm.failed]:
        parts.append(Text(f"Failed, left out of the means: {', '.join(failed)}"))
    if warning := stand_in_warning(report):
        parts.append(Text(f"* {warning}", "yellow"))
    return Group(*parts)


def render_html(report: Report, out: Path) -> Artifact:
    """Write the report as one HTML file that needs nothing else."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    helpers = (
        number,
        signed,
        interval,
        count,
        usd,
        formats.latency,
        formats.duration,
        p_value,
        arm_label,
        metric_label,
    )
    environment.filters |= {helper.__name__: helper for helper in (*helpers, metric_label, pair)}
    page = environment.get_template("report.html.j2").render(_view(report))
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_suffix(out.suffix + ".partial")
    partial.write_text(page, encoding="utf-8")
    partial.replace(out)
    return Artifact.of(out)


def _view(report: Report) -> dict[str, Any]:
    arms = [name for name in ARMS if name in report.arms]
    return {
        "report": report,
        "verdict": verdict(report),
        "headline": _headline(report),
        "warning": stand_in_warning(report),
        "star": lambda key: "*" if starred(report, key) else "",
        "arms": arms,
        "heads": ARM_HEADS,
        "arm_dots": _arm_dots(report, arms),
        "difference_dots": _difference_dots(report),
        "charts": _charts(report.curves),
        "funnel": _funnel(report.stages),
        "training": _training(report.training),
        "detectable": DETECTABLE,
    }


def _headline(report: Report) -> Comparison | None:
    usable = {(c.a, c.b, c.metric): c for c in report.comparisons if c.diff is not None}
    keys = ((*pair, metric) for pair in _HEADLINE_PAIRS for metric in METRICS)
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


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _with_interval(value: float | None, ends: Interval | None, show: Callable[[float | None], str]) -> str:
    return f"{show(value)} {interval(ends)}" if ends else show(value)


def _arms_table(report: Report) -> Table:
    def star(key: str) -> str:
        return "*" if starred(report, key) else ""

    table = Table(box=box.SIMPLE, pad_edge=False, padding=(0, 1))
    table.add_column("arm", no_wrap=True)
    heads = ("n", f"top-1{star('top1')} [95% CI]", f"MRR@10{star('mrr10')}", f"score{star('mean_top1_score')}")
    for head in (*heads, f"judge{star('quality')}", "p50/p95 ms", "$/1000"):
        table.add_column(head, justify="right", no_wrap=True)
    for name, arm in ((name, report.arms[name]) for name in ARMS if name in report.arms):
        table.add_row(
            ARM_HEADS[name] + star(name),
            count(arm.n),
            _with_interval(arm.top1, arm.top1_ci95, number),
            number(arm.mrr10),
            number(arm.mean_top1_score),
            number(arm.quality, 2),
            f"{formats.latency(arm.latency_p50_ms)}/{formats.latency(arm.latency_p95_ms)}",
            usd(arm.cost_per_1000_usd).removeprefix("$"),
        )
    return table


def _comparisons_table(report: Report) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1), show_header=False)
    main = _headline(report)
    shown = [c for c in _in_order(report.comparisons, _TERMINAL_PAIRS) if main and c.metric == main.metric]
    for c in shown:
        table.add_row(
            pair(c),
            metric_label(c.metric),
            _with_interval(c.diff, c.ci95, signed),
            f"p {p_value(c.p_value)}",
            f"{c.wins}/{c.ties}/{c.losses} w/t/l",
            f"detects {number(c.detectable_diff)}",
        )
    return table


def _in_order(comparisons: Sequence[Comparison], pairs: Sequence[tuple[str, str]]) -> list[Comparison]:
    places = {pair: place for place, pair in enumerate(pairs)}
    return sorted(
        (c for c in comparisons if (c.a, c.b) in places and c.diff is not None), key=lambda c: places[c.a, c.b]
    )


def _arm_dots(report: Report, arms: Sequence[ArmName]) -> DotPlot | None:
    """One dot per arm on the best metric there is; only top-1 has intervals."""
    metric = next((m for m in METRICS if any(getattr(report.arms[a], m) is not None for a in arms)), None)
    if metric is None:
        return None
    shown = [(name, _capital(ARMS[name]), report.arms[name]) for name in arms]
    rows = [(n, label, getattr(arm, metric), arm.top1_ci95 if metric == "top1" else None) for n, label, arm in shown]
    return dot_plot(metric_label(metric), rows, number)


def _difference_dots(report: Report) -> DotPlot | None:
    """One dot per comparison on the headline's metric, around 0."""
    main = _headline(report)
    if main is None:
        return None
    shown = [c for c in report.comparisons if c.metric == main.metric]
    rows = [(c.a, pair(c), c.diff, c.ci95) for c in shown]
    return dot_plot(metric_label(main.metric), rows, signed, zero=True)


def _charts(curves: Mapping[str, Sequence[Series]]) -> list[Chart]:
    order = sorted(curves, key=lambda name: (list(CURVES).index(name) if name in CURVES else len(CURVES), name))
    charts = []
    for name in order:
        title, x_label = CURVES.get(name, (name, "step"))
        series = [(s.label, [(x, y) for x, y in zip(s.x, s.y, strict=True) if y is not None]) for s in curves[name]]
        if any(points for _, points in series):
            charts.append(chart(title, x_label, series))
    return charts


def _funnel(stages: Sequence[Stage]) -> list[dict[str, Any]]:
    """Stages that count rows, with bar widths in percent of the fullest stage."""
    counted = [stage for stage in stages if stage.rows_in]
    full = max((stage.rows_in for stage in counted), default=1)
    return [
        {
            "stage": stage,
            "kept": 100 * min(stage.rows_out, stage.rows_in) / full,
            "fell": 100 * sum(stage.dropped.values()) / full,
            "reasons": sorted(stage.dropped.items(), key=lambda item: -item[1]),
        }
        for stage in counted
    ]


def _training(training: Training) -> list[tuple[str, list[tuple[str, str]]]]:
    blocks = []
    for title, part in (("SFT", training.sft), ("RL", training.rl)):
        if part is not None:
            facts = [(key.replace("_", " "), value) for key, value in part.model_dump().items() if value is not None]
            blocks.append((title, [(key, formats.plain(value)) for key, value in facts]))
    return blocks
