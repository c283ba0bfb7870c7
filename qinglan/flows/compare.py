"""Several teachers on the same questions: which one to buy."""

from pathlib import Path

from prefect import flow

from qinglan.evaluation.teacher_comparison import teachers_of
from qinglan.runs.artifacts import StageResult
from qinglan.tasks.compare import compare_teachers
from qinglan.tasks.distill import distill_rows
from qinglan.tasks.engine import stop_jobs
from qinglan.tasks.extract import with_extracted
from qinglan.tasks.forms import DataChanges, Override, ProfileName, overrides_of
from qinglan.tasks.ingest import ingest_workbook
from qinglan.tasks.report import write_report
from qinglan.tasks.sample import draw_questions
from qinglan.tasks.session import open_session
from qinglan.tasks.validate import validate_rows


@flow(
    name="compare", flow_run_name="compare {profile}", log_prints=True, on_cancellation=[stop_jobs]
)
def compare(
    profile: ProfileName = "embedded",
    changes: DataChanges = DataChanges(),
    overrides: tuple[Override, ...] = (),
    fresh: bool = False,
) -> Path:
    """Ask the profile's teacher and those in its `compare`; returns the path of report.json.

    Args:
        profile: Name of a file in configs/, or a path.
        changes: Settings of this run; an empty one stays as the profile says.
        overrides: Any other setting, as `dotted.key=value`; docs/reference/configuration.md lists
            them.
        fresh: Compute every stage anew instead of reusing what earlier runs left unchanged.
    """
    with open_session(profile, overrides_of(changes, overrides), "compare", fresh=fresh) as session:
        run = session.run
        services = session.services
        read_stages = with_extracted(run, services, ingest_workbook(run, session.workbook))
        sample = draw_questions(run, read_stages[-1])
        stages = [*read_stages, sample]
        validated: dict[str, StageResult] = {}
        for teacher in teachers_of(run, services):
            distilled = distill_rows(
                teacher.run, teacher.services, sample, teacher.stage("distill")
            )
            validated[teacher.arm] = validate_rows(
                teacher.run, teacher.services, distilled, teacher.stage("validate")
            )
            stages += [distilled, validated[teacher.arm]]
        compared = compare_teachers(run, services, validated)
        return write_report(run, [*stages, compared])
