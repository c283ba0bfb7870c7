"""The section about what is kept for how long, and the disk space that a stage needs."""

from typing import Annotated

from pydantic import Field

from qinglan.config.base import Count, Section

Days = Annotated[float, Field(ge=0)]


class Retention(Section):
    """What `qinglan clean-up` removes (docs/retention.md); `null` keeps it for ever. A run's days count from its last
    work. What a registered model, a running run or a run that is kept needs stays, whatever is written here."""

    run_days: Days | None = 60
    """Finished runs that are older go, except the newest of each flow."""
    runs_per_flow: Count | None = None
    """Of each flow's finished runs so many, the newest, stay; the others go whatever their age."""
    unfinished_days: Days | None = 14
    """Runs that were interrupted and not continued since."""
    checkpoint_days: Days | None = 7
    """Checkpoints of finished runs; the models and adapters that they handed on stay."""
    superseded_days: Days | None = 14
    """What a stage left that had to start anew, `<stage>.superseded-N`."""
    dataset_days: Days | None = 365
    """Dataset versions that no run, training or registered model uses; the newest stays."""
    mlflow_days: Days | None = 180
    """MLflow's runs with their artifacts, whose run folder was removed before."""
    flow_run_days: Days | None = 30
    """Prefect's flow runs that have ended, with their logs and artifacts."""
    log_days: Days | None = 30
    """Files of `qinglan up` and of servers in `logs/` under `paths.state` that no process has written to since."""
    min_free_mb: Count = 500
    """No stage starts with less free space at `paths.runs` or `paths.state`. SFT and RL want more, by the model."""
