"""A bound on the new questions of a run whose workbook is the router's request log.

Whoever asks the router writes that log.
"""

from collections.abc import Collection, Iterable, Iterator

from qinglan.config import Profile
from qinglan.data.versions import INDEX, questions_in, tenant_folder
from qinglan.recipes import get_recipe, identifying
from qinglan.rows import LEFT_FOR_LATER, Row, row_id


def take_new_rows(
    rows: Iterable[Row], second_pass: Iterable[Row], profile: Profile, known_version: str
) -> Iterator[Row]:
    """The rows, of which new ones beyond `data.max_new_rows` fail as `left_for_later`.

    Those stay that were asked on the most days, as the log has a question once a day, and of these
    the newest.

    Args:
        rows: all rows, to count the days.
        second_pass: the same rows again.
        known_version: the dataset version whose questions are not new; empty where there is none.
    """
    index = tenant_folder(profile) / known_version / INDEX
    old_ids: set[str] = set()
    if known_version and index.exists():
        old_ids = questions_in(index)
    inputs = get_recipe(profile.recipe).INPUTS
    days: dict[str, int] = {}
    for row in rows:
        if row.reason not in (None, "duplicate"):
            continue
        # A duplicate has an id of its own; the days are counted by the question's.
        identifying_inputs = identifying(row.inputs, inputs)
        question_id = row_id(row.tenant, row.query, row.profile, row.history, identifying_inputs)
        if question_id not in old_ids:
            # It goes to the end, so that the order is that of the newest days.
            days[question_id] = days.pop(question_id, 0) + 1
    fewest_days_first = sorted(days, key=days.__getitem__)
    left_ids = set(fewest_days_first[: -profile.data.max_new_rows])
    return _without(second_pass, left_ids)


def _without(rows: Iterable[Row], left_ids: Collection[str]) -> Iterator[Row]:
    for row in rows:
        yield row.failed(LEFT_FOR_LATER) if row.id in left_ids else row
