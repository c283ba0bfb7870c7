"""A recipe outside the package, for tests: a weak model answers, the teacher thinks about its
answer."""

from collections.abc import Mapping

from capitals_recipe import Capitals

from qinglan.clients.roles import ChatRole, Clients
from qinglan.config import Tenant
from qinglan.recipes import Message, answered
from qinglan.rows import Row


class Judging(Capitals):
    """What is learnt is the teacher's chain of thought and its word."""

    NAME = "judging_recipe"
    DISTILL_ROLES = ("answerer", "teacher")

    def distill_messages(self, row: Row, tenant: Tenant) -> Mapping[ChatRole, list[Message]]:
        asked = self.student_messages(row, tenant)
        return {"answerer": asked, "teacher": [*asked, {"role": "assistant", "content": "……"}]}

    async def distill(self, row: Row, clients: Clients, tenant: Tenant) -> Row:
        asked = self.student_messages(row, tenant)
        weak = await clients.answerer.ask(asked, str)
        verdict = await clients.teacher.ask(
            [*asked, {"role": "assistant", "content": weak.value}], self.parse_answer
        )
        return answered(row, f"<think>{verdict.reasoning}</think>{verdict.value}", verdict)


RECIPE = Judging()
