"""A recipe outside the package, for tests: a weak model answers, the teacher thinks about that."""

from collections.abc import Mapping
from dataclasses import replace

from capitals_recipe import Capitals

from qinglan.clients.roles import ChatRole, Clients
from qinglan.config import Tenant
from qinglan.recipes import Message
from qinglan.rows import Row


class Judging(Capitals):
    """The student learns the teacher's chain of thought and its word."""

    NAME = "judging_recipe"
    DISTILL_ROLES = ("answerer", "teacher")
    grader = replace(Capitals.grader, recipe=NAME)

    def distill_messages(self, row: Row, tenant: Tenant) -> Mapping[ChatRole, list[Message]]:
        question = self.student_messages(row, tenant)
        return {
            "answerer": question,
            "teacher": [*question, {"role": "assistant", "content": "……"}],
        }

    async def distill(self, row: Row, clients: Clients, tenant: Tenant) -> Row:
        question = self.student_messages(row, tenant)
        weak = await clients.answerer.ask(question, str)
        verdict = await clients.teacher.ask(
            [*question, {"role": "assistant", "content": weak.value}], self.parse_answer
        )
        return row.with_answer(
            f"<think>{verdict.reasoning}</think>{verdict.value}",
            request=verdict.request_hash,
            latency_ms=verdict.latency_ms,
            cost_usd=verdict.cost_usd,
        )


RECIPE = Judging()
