"""What to do about a problem that a message from deeper down only names: by the check, so that no ✗ goes without."""

from dataclasses import replace

from qinglan.ops.checks import Check

_MARK = "; "
"""Our messages say what is wrong, then what to do about it; this stands between the two."""
HINTS = {
    "recipe": "correct the profile, or the recipe's file (docs/add-a-recipe.md)",
    "workbook": "correct data, or what it names",
    "compare": "correct compare.teachers",
    "red team": "correct evaluate.red_team, or what it names (docs/red-team.md)",
    "champion": "bring its files back, or promote another version: `qinglan release list`",
    "local judge": "correct judge.local, or leave it out",
    "rag": "correct the service, or what the rag section names (docs/rag-service.md)",
    "ledger": "correct ledger.url_env, or the database that it names",
    "base model": "correct student.base_model",
    "critic model": "correct rl.critic_model",
    "device": "correct the trainer section, or run on another machine",
    "ray": "see the cluster's own log, or correct trainer.ray_dashboard_url",
    "trainer packages": "correct trainer.python, or run `make setup`",
    "prefect": "correct the address, or unset what names it",
    "mlflow": "correct tracking.uri",
    "mount": "see the cluster's own log, or correct trainer.ray_dashboard_url",
    "nodes": "install the same environment on every node",
}
_OTHERS = "see docs/doctor.md"


def with_hint(check: Check) -> Check:
    """The same, its problem with what to do about it."""
    if check.problem is None or _MARK in check.problem:
        return check
    return replace(check, problem=f"{check.problem.rstrip('. ')}{_MARK}{_hint_of(check.name)}")


def _hint_of(name: str) -> str:
    if name in HINTS:
        return HINTS[name]
    role = name.removesuffix(" answers")
    if role.partition(".")[0] in ("teacher", "answerer", "judge", "compare"):
        return f"correct {role} in the profile, or ask the service by hand"
    return _OTHERS
