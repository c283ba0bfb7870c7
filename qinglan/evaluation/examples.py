"""Questions for readers of the report, and what the test split shares with training."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from qinglan.evaluation.metrics import values_of
from qinglan.evaluation.models import ExampleArm, ReportExample, Shared, SharedThing
from qinglan.recipes import Recipe
from qinglan.rows import ArmName, ArmRow, Retrieved, Row, normalise


def examples(
    arms: Mapping[ArmName, Sequence[ArmRow]], rows: Sequence[Row], recipe: Recipe, count: int = 10
) -> list[ReportExample]:
    """Questions spread over groups: the first of every k-th group, in the order of row ids."""
    first_of_group = {row.gold_id or row.id: row for row in sorted(rows, key=lambda r: r.id, reverse=True)}
    spread = sorted(first_of_group.values(), key=lambda row: row.id)
    chosen = spread[:: max(1, len(spread) // count)][:count]
    by_arm = {name: {entry.row_id: entry for entry in arm} for name, arm in arms.items()}
    return [
        ReportExample(
            query=row.query,
            profile=row.profile,
            history=row.history,
            inputs={each.column: row.inputs[each.name] for each in recipe.INPUTS if each.name in row.inputs},
            gold_id=row.gold_id,
            gold_title=_title_of(row.gold_id, (entries[row.id] for entries in by_arm.values() if row.id in entries)),
            arms={
                name: ExampleArm(
                    text=entry.text,
                    reason=entry.reason,
                    retrieved=entry.retrieved and _first_places(entry.retrieved),
                    values={} if recipe.retrieves else values_of(entry, row, recipe),
                )
                for name, entries in by_arm.items()
                if (entry := entries.get(row.id))
            },
        )
        for row in chosen
    ]


def shared_between(train: Sequence[Row], test: Sequence[Row], recipe: Recipe) -> list[Shared]:
    """What the test split has in common with training rows."""

    def overlap(what: SharedThing, key: Callable[[Row], str | None]) -> Shared:
        seen = {key(row) for row in train} - {None}
        asked = {key(row) for row in test} - {None}
        return Shared(what=what, test=len(asked), in_train=len(asked & seen))

    identifying = [each.name for each in recipe.INPUTS if each.identifies]

    def with_context(row: Row) -> str:
        inputs = "".join(row.inputs.get(name, "") for name in identifying)
        return normalise(row.query + row.history + row.profile + inputs)

    shared = [
        overlap("row_ids", lambda row: row.id),
        overlap("questions_with_context", with_context),
        overlap("bare_questions", lambda row: normalise(row.query)),
    ]
    return [*shared, overlap("gold_documents", lambda row: row.gold_id)] if recipe.retrieves else shared


def _title_of(document_id: str | None, entries: Iterable[ArmRow]) -> str | None:
    """A document's title, if any arm found it."""
    for entry in entries:
        if entry.retrieved and 0 < (rank := entry.retrieved.rank(document_id)) <= len(entry.retrieved.titles):
            return entry.retrieved.titles[rank - 1]
    return None


def _first_places(retrieved: Retrieved) -> Retrieved:
    return Retrieved(ids=retrieved.ids[:3], scores=retrieved.scores[:3], titles=retrieved.titles[:3])
