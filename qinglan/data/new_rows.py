"""How many new questions a run takes where its workbook is the router's request log, which whoever
asks it writes."""

from collections.abc import Iterable, Iterator

from qinglan.config import Profile
from qinglan.data.versions import INDEX, questions_in, tenant_folder
from qinglan.recipes import get_recipe, identifying
from qinglan.rows import LEFT_FOR_LATER, Row, row_id


def take_new_rows(
    rows: Iterable[Row], second_pass: Iterable[Row], profile: Profile, known_version: str
) -> Iterator[Row]:
    """The rows, of which those that are new and more than `data.max_new_rows` fail as
    `left_for_later`.

    Those stay that were asked on the most days, as the log has a question once a day, and of these
    the newest. The rows are read twice. `known_version` is the dataset version whose questions are
    not new; empty where there is none.
    """
    index, inputs = (
        tenant_folder(profile) / known_version / INDEX,
        get_recipe(profile.recipe).INPUTS,
    )
    known = questions_in(index) if known_version and index.exists() else set[str]()
    days: dict[str, int] = {}
    for row in rows:
        if row.reason in (None, "duplicate"):
            asked = row_id(
                row.tenant, row.query, row.profile, row.history, identifying(row.inputs, inputs)
            )
            if asked not in known:
                days[asked] = days.pop(asked, 0) + 1  # at the end: the order is that of the newest
    left = set(sorted(days, key=days.__getitem__)[: -profile.data.max_new_rows])
    return (row.failed(LEFT_FOR_LATER) if row.id in left else row for row in second_pass)
