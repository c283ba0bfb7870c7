"""A person's approval of a model that the gate passed: one more rule of the decision."""

from functools import partial
from pathlib import Path
from uuid import UUID

from pydantic import BaseModel, ValidationError

from qinglan.evaluation.models import APPROVAL, Decision, Rule
from qinglan.evaluation.reasons import Reason, reason
from qinglan.runs.artifacts import write_json
from qinglan.runs.schema_version import dump_record, read_record

WAITING_FILE = "waiting.json"


class Approval(BaseModel, frozen=True, extra="forbid"):
    approve: bool
    reviewer: str
    comment: str = ""

    @property
    def found(self) -> Reason:
        code = "approved" if self.approve else "refused"
        return reason(code, reviewer=self.reviewer or reason("nameless"), comment=self.comment)


class Waiting(BaseModel):
    """`waiting.json` in the gate's folder, for as long as the flow waits for a person."""

    flow_run_id: UUID
    api_url: str
    """Of the Prefect server that the flow runs under, without a login."""
    page: str
    until: str
    workbook: Path

    @classmethod
    def read(cls, folder: Path) -> "Waiting | None":
        try:
            return read_record(cls, folder / WAITING_FILE)
        except (FileNotFoundError, ValidationError):
            return None

    def write(self, folder: Path) -> None:
        write_json(folder / WAITING_FILE, dump_record(self))


def decided_by(decision: Decision, approval: Approval | None) -> Decision:
    """The decision with a person's answer in it; `undecided` while there is none."""
    rule = partial(Rule, name=APPROVAL, required=reason("approval_needed"))
    others = [each for each in decision.rules if each.name != APPROVAL]
    if approval is None:
        last = rule(outcome="unknown", found=reason("nobody_answered"), reason=reason("nobody_approved"))
        return decision.model_copy(update={"verdict": "undecided", "rules": [*others, last]})
    if approval.approve:
        last = rule(outcome="pass", found=approval.found)
        return decision.model_copy(update={"verdict": "promote", "rules": [*others, last]})
    last = rule(outcome="fail", found=approval.found, reason=approval.found)
    return decision.model_copy(update={"verdict": "refuse", "rules": [*others, last]})


def lacks_only_approval(decision: Decision) -> bool:
    blocking = [rule.name for rule in decision.rules if rule.outcome != "pass"]
    return decision.verdict == "undecided" and blocking == [APPROVAL]
