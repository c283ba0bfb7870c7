"""What a run found, in sentences: the verdict and the warnings. The models behind it are in `report_models`, the names
of things in `report_words`; `report_html` and `report_terminal` show it."""

from typing import Literal, NamedTuple

from qinglan.config import EMBEDDED, Profile
from qinglan.evaluation.models import (
    Api,
    Arm,
    Distribution,
    Example,
    ExampleArm,
    Number,
    Part,
    Purchase,
    RagCalls,
    Registered,
    Report,
    RlTraining,
    Score,
    Series,
    SftTraining,
    Shared,
    SimulatedRole,
    Slice,
    SliceArm,
    SliceDiff,
    Stage,
    StageArtifact,
    Tone,
    Training,
)
from qinglan.evaluation.report.words import ALARMS, SIMULATED_ROLES, arm_words, listed
from qinglan.recipes import Metric, get_recipe
from qinglan.rows import ArmName
from qinglan.statistics import Comparison
from qinglan.text import ARMS, Both, Language, capitalised, count, number, signed, with_interval

__all__ = [
    "Api",
    "Arm",
    "Distribution",
    "Example",
    "ExampleArm",
    "Number",
    "Part",
    "Purchase",
    "RagCalls",
    "Registered",
    "Report",
    "RlTraining",
    "Score",
    "Series",
    "SftTraining",
    "Shared",
    "SimulatedRole",
    "Slice",
    "SliceArm",
    "SliceDiff",
    "Stage",
    "StageArtifact",
    "Tone",
    "Training",
]

_PLACES = ["original", "teacher", "", "base", "sft", "rl", "champion"]
"""Of the arms on the page; further teachers stand where the empty name is."""
_MAIN_PAIRS = (("rl", "teacher"), ("sft", "teacher"), ("rl", "sft"), ("sft", "base"), ("teacher", "original"))
"""After those with the gate's rivals."""
STUDENTS = ("base", "sft", "rl", "champion")
QUALITY = "quality"
"""The metric that is the judge's score, whatever the recipe."""


class Verdict(NamedTuple):
    """The run's result in a sentence, and how to read it."""

    tone: Tone
    sentence: str
    reading: str


def simulated_roles_of(profile: Profile) -> list[SimulatedRole]:
    """What the embedded stand-ins play under this profile, of what its recipe asks."""
    recipe = get_recipe(profile.recipe)
    asked = {*recipe.DISTILL_ROLES, *recipe.graders, "student", "workbook"}
    places: dict[SimulatedRole, str] = {
        "teacher": profile.teacher.base_url,
        "answerer": profile.answerer.base_url if profile.answerer else "",
        "judge": profile.judge.base_url,
        "rag": profile.rag.url,
        "student": profile.student.base_model,
        "workbook": "" if profile.data.sql else profile.data.workbook,
    }
    return [role for role, place in places.items() if role in asked and place == EMBEDDED]


def verdict(report: Report, language: Language = "en") -> Verdict:
    """The headline: which teacher to buy, or the furthest student against the teacher on the best metric there is.

    A purchase's advice is kept as it was written, in English; in Chinese its headline comparison stands in front.
    """
    found = headline(report)
    if report.purchase and (language == "en" or found is None):
        return Verdict(report.purchase.tone, report.purchase.sentence, report.purchase.reading)
    if found is None or found.diff is None:
        return Verdict("none", *_without_comparison(report, language))
    a, b = (getattr(arm_label_words(name, report), language) for name in (found.a, found.b))
    sentence = _sentence(report, found, a, b, language)
    if report.purchase:
        return Verdict(report.purchase.tone, sentence, _reading(found, a, b, language))
    return Verdict(_tone(found), sentence, _reading(found, a, b, language))


def simulator_warning(report: Report, language: Language = "en", *, marked: bool = True) -> str:
    """What the numbers can't say, or nothing where everything was real.

    Args:
        marked: those that it concerns have a star.
    """
    if not report.simulated:
        return ""
    names = listed([getattr(SIMULATED_ROLES[role], language) for role in report.simulated], language)
    if language == "zh":
        about = " GPT-5 或您的数据" if "teacher" in report.simulated else "您自己的服务或数据"
        numbers = "带 * 的数字" if marked else "这些数字"
        return f"{names}由内置替身扮演。{numbers}只说明整套流程能运行，不说明{about}的情况。"
    verb = "were embedded stand-ins" if len(report.simulated) > 1 else "was an embedded stand-in"
    about = "GPT-5 or your data" if "teacher" in report.simulated else "your own service or data"
    numbers = "The numbers marked *" if marked else "These numbers"
    return f"{capitalised(names)} {verb}. {numbers} say that the machinery works, nothing about {about}."


def alarm_warning(report: Report, language: Language = "en") -> str:
    """Which alarms sounded in RL, or nothing where none did."""
    steps: dict[str, list[str]] = {}
    for alarm in report.alarms:
        steps.setdefault(alarm.name, []).append(str(alarm.step))
    if not steps:
        return ""
    if language == "zh":
        named = [f"{ALARMS[name].zh}（第 {'、'.join(at)} 步）" for name, at in steps.items()]
        return f"RL 训练发出警报：{'；'.join(named)}。详见 docs/alarms.md。"
    named = [f"{name} (step {', '.join(at)})" for name, at in steps.items()]
    return f"RL training sounded alarms: {', '.join(named)}. See docs/alarms.md."


def starred(report: Report, key: str) -> bool:
    """Whether an arm's or a metric's numbers come from a stand-in; a student learnt from its teacher and its RAG."""
    sources: dict[str, set[SimulatedRole]] = {
        "original": {"workbook"},
        "teacher": {"workbook", "teacher"},
        "base": {"workbook", "student"},
        QUALITY: {"workbook", "judge"},
        "judge_consistency": {"workbook", "judge"},
    }
    if key in ("sft", "rl", "champion"):
        return bool(report.simulated)
    if report.purchase and key in report.purchase.labels and key != "teacher":
        return key in report.purchase.simulated
    return not sources.get(key, {"workbook", "rag"}).isdisjoint(report.simulated)


def arms_of(report: Report) -> dict[ArmName, Arm]:
    """The report's arms, in the order in which they are shown."""
    names = sorted(report.arms, key=lambda name: _PLACES.index(name if name in ARMS else ""))
    return {name: report.arms[name] for name in names}


def arm_label(name: str, report: Report | None = None) -> str:
    """An arm's name in an English sentence."""
    return arm_label_words(name, report).en


def arm_label_words(name: str, report: Report | None = None, *, head: bool = False) -> Both:
    """An arm's name in both languages; a teacher that is compared goes by its own."""
    own = report.purchase.labels.get(name) if report and report.purchase else None
    return Both(own, own) if own else arm_words(name, head=head)


def arm_head(name: str, report: Report | None = None) -> str:
    """An arm's name at the head of a column."""
    return arm_label_words(name, report, head=True).en


def metric_words(name: str, report: Report) -> Both:
    """A metric's name in a sentence."""
    metric = report.metric(name)
    return Both(metric.en, metric.zh)


def pair(comparison: Comparison, report: Report | None = None) -> str:
    """`RL − Teacher`."""
    return pair_words(comparison.a, comparison.b, report).en


def pair_words(a: ArmName, b: ArmName, report: Report | None = None) -> Both:
    """`RL − Teacher` in both languages."""
    left, right = (arm_label_words(name, report, head=True) for name in (a, b))
    return Both(f"{left.en} − {right.en}", f"{left.zh} − {right.zh}")


def headline(report: Report) -> Comparison | None:
    """The comparison that the verdict speaks of: the challenger's, where a gate decided on one."""
    usable = {(c.a, c.b, c.metric): c for c in report.comparisons if c.diff is not None}
    challenger = (report.decision.challenger,) if report.decision else ()
    gated = [(arm, rival) for arm in (*challenger, "rl", "sft") for rival in report.rivals]
    pairs = [(report.purchase.rival, "teacher")] if report.purchase else [*gated, *_MAIN_PAIRS]
    keys = ((a, b, metric.name) for a, b in pairs for metric in by_preference(report))
    return next((usable[key] for key in keys if key in usable), None)


def by_preference(report: Report) -> list[Metric]:
    """The metrics, those that a headline should be about first."""
    return sorted(report.metrics, key=lambda metric: not metric.primary)


def candidate(report: Report) -> ArmName | None:
    """The arm that the report is about: the gate's challenger, or the first of the headline."""
    if report.decision and report.decision.challenger in report.arms:
        return report.decision.challenger
    found = headline(report)
    return found.a if found else None


def opponent(report: Report) -> ArmName:
    """What the candidate is held against: the gate's rival; the teacher against the original question."""
    found, name = headline(report), candidate(report)
    if found and found.a == name:
        return found.b
    return "original" if name == "teacher" else report.rivals[0]


_NOTHING = {
    "en": ("Nothing was compared in this run.", "No two arms have values for the same questions."),
    "zh": ("本次运行没有可比较的结果。", "没有两个组在相同的问题上都有数值。"),
}
_ONLY_DATA = {
    "en": (
        "{rows_out} of {rows_in} rows are in the dataset.",
        "Nothing was compared: no two arms have values for the same questions.",
    ),
    "zh": (
        "{rows_in} 行中有 {rows_out} 行进入数据集。",
        "没有可比较的结果：没有两个组在相同的问题上都有数值。",
    ),
}


def _without_comparison(report: Report, language: Language) -> tuple[str, str]:
    """Of a refresh, at least what became of the rows."""
    read, made = report.stage("ingest"), report.stage("dataset")
    if not (report.is_of_data and read and made):
        return _NOTHING[language]
    sentence, reading = _ONLY_DATA[language]
    return sentence.format(rows_in=count(read.rows_in), rows_out=count(made.rows_out)), reading


def _sentence(report: Report, found: Comparison, a: str, b: str, language: Language) -> str:
    metric = getattr(metric_words(found.metric, report), language)
    mean_a, mean_b = (number(mean, report.metric(found.metric).digits) for mean in (found.mean_a, found.mean_b))
    difference = with_interval(found.diff, found.ci95, signed)
    of_test = any(arm in report.arms for arm in STUDENTS)
    if language == "zh":
        questions = f"{count(found.n)} 个{'测试' if of_test else ''}问题"
        return f"{a} {mean_a}，{b} {mean_b}（{metric}，{questions}）：{difference}"
    questions = "test questions" if of_test else "questions"
    return f"{capitalised(a)} {mean_a} vs {b} {mean_b} {metric} on {count(found.n)} {questions}: {difference}"


def _tone(found: Comparison) -> Literal["better", "worse", "open"]:
    if found.ci95 is None or found.ci95[0] <= 0 <= found.ci95[1]:
        return "open"
    return "better" if found.ci95[0] > 0 else "worse"


def _reading(found: Comparison, a: str, b: str, language: Language) -> str:
    detectable = number(found.detectable_diff) if found.detectable_diff else ""
    if language == "zh":
        if found.ci95 is None:
            return "所有问题属于同一组，无法给出区间。"
        detects = f"本测试集能检出 {detectable} 的差异。" if detectable else ""
        return {
            "better": f"95% 区间在 0 之上：在这类问题上，{a}优于{b}。",
            "worse": f"95% 区间在 0 之下：在这类问题上，{a}不如{b}。",
            "open": f"95% 区间包含 0：没有显示出差异。{detects}",
        }[_tone(found)]
    if found.ci95 is None:
        return "All questions belong to one group, so that no interval can be given."
    detects = f" This test set can detect {detectable}." if detectable else ""
    return {
        "better": f"The 95% interval lies above 0: the {a} is better than the {b} on questions like these.",
        "worse": f"The 95% interval lies below 0: the {a} is worse than the {b} on questions like these.",
        "open": f"The 95% interval includes 0: no difference is shown.{detects}",
    }[_tone(found)]
