"""A person's word on a model that the gate passed: one more rule of the decision."""

from pathlib import Path
from uuid import UUID

from pydantic import BaseModel, ConfigDict, ValidationError

from qinglan.evaluation.gate import gain_of
from qinglan.evaluation.models import Decision, Rule, Verdict
from qinglan.evaluation.report.words import rival_words
from qinglan.runs.artifacts import write_json
from qinglan.runs.schema_version import dump_record, read_record

APPROVAL = "approval"
WAITING_FILE = "waiting.json"
_REQUIRED = "a person's approval (gate.approval)"


class Approval(BaseModel):
    """What a person decided."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    approve: bool
    reviewer: str
    comment: str = ""

    @property
    def found(self) -> str:
        """In words."""
        said = "approved" if self.approve else "refused"
        return f"{said} by {self.reviewer or 'a person without a name'}" + (f": {self.comment}" if self.comment else "")


class Waiting(BaseModel):
    """`waiting.json` in the gate's folder, for as long as the flow waits for a person."""

    flow_run_id: UUID
    api_url: str
    """Of the Prefect server that the flow runs under, without a login."""
    page: str
    """Where the form is."""
    until: str
    workbook: Path

    @classmethod
    def read(cls, folder: Path) -> "Waiting | None":
        """What a flow left that waits, or was killed while it waited."""
        try:
            return read_record(cls, folder / WAITING_FILE)
        except (FileNotFoundError, ValidationError):
            return None

    def write(self, folder: Path) -> None:
        """Say where the answer is awaited."""
        write_json(folder / WAITING_FILE, dump_record(self))


def decided_by(decision: Decision, approval: Approval | None) -> Decision:
    """The decision with a person's word in it; `undecided` while there is none."""
    outcome: dict[Verdict, Rule] = {
        "promote": Rule(name=APPROVAL, outcome="pass", found=approval.found if approval else "", required=_REQUIRED),
        "refuse": Rule(
            name=APPROVAL,
            outcome="fail",
            found=approval.found if approval else "",
            required=_REQUIRED,
            reason=approval.found if approval else "",
        ),
        "undecided": Rule(
            name=APPROVAL,
            outcome="unknown",
            found="nobody answered",
            required=_REQUIRED,
            reason=(
                "nobody approved it in time; `qinglan release approve RUN --reviewer NAME --profile PROFILE` still can"
            ),
        ),
    }
    verdict: Verdict = "undecided" if approval is None else "promote" if approval.approve else "refuse"
    rule = outcome[verdict]
    others = [each for each in decision.rules if each.name != APPROVAL]
    model = rival_words(decision.challenger).en
    instead = f" in place of version {decision.champion}" if decision.champion else ""
    gain = f"; {found}" if (found := gain_of(others)) else ""
    sentence = {
        "promote": f"Release {model}{instead}: {rule.found}, and all other rules hold{gain}.",
        "refuse": f"Do not release {model}: all other rules hold, but it was {rule.found}.",
        "undecided": f"Undecided about {model}: all other rules hold, but {rule.reason}.",
    }[verdict]
    return decision.model_copy(update={"verdict": verdict, "rules": [*others, rule], "sentence": sentence})


def lacks_only_approval(decision: Decision) -> bool:
    """Would a person's yes release it?"""
    blocking = [rule.name for rule in decision.rules if rule.outcome != "pass"]
    return decision.verdict == "undecided" and blocking == [APPROVAL]
