"""A profile: everything that a run depends on, as one YAML file read into frozen models.

Unknown keys are refused with the nearest right name. Secrets appear only as the *name* of an environment
variable. Engine settings keep the engines' own names where they are handed through unchanged.
"""

from qinglan.config.base import EMBEDDED
from qinglan.config.data import BatchApi, Columns, Compare, Data, Dataset, Distill, Refresh, Select, Sql, Validate
from qinglan.config.notify import Automations, Notify, NotifyFormat, NotifyTopic
from qinglan.config.profile import (
    CHANGEABLE,
    FlowName,
    Profile,
    explain,
    load_profile,
    profile_names,
    require_secret,
    uses_proxy,
)
from qinglan.config.release import Canary, Gate, Release, RequestLog, Serve
from qinglan.config.retention import Retention
from qinglan.config.rl import AlarmAction, AlarmName, Alarms, Algorithm, Kl, Reward, Rl
from qinglan.config.site import (
    Budget,
    Embedded,
    Endpoint,
    Judge,
    LedgerStore,
    LocalJudge,
    Paths,
    Price,
    Rag,
    Tenant,
    Tracking,
    Trainer,
)
from qinglan.config.training import Evaluate, Sft, Student

__all__ = [
    "CHANGEABLE",
    "EMBEDDED",
    "AlarmAction",
    "AlarmName",
    "Alarms",
    "Algorithm",
    "Automations",
    "BatchApi",
    "Budget",
    "Canary",
    "Columns",
    "Compare",
    "Data",
    "Dataset",
    "Distill",
    "Embedded",
    "Endpoint",
    "Evaluate",
    "FlowName",
    "Gate",
    "Judge",
    "Kl",
    "LedgerStore",
    "LocalJudge",
    "Notify",
    "NotifyFormat",
    "NotifyTopic",
    "Paths",
    "Price",
    "Profile",
    "Rag",
    "Refresh",
    "Release",
    "RequestLog",
    "Retention",
    "Reward",
    "Rl",
    "Select",
    "Serve",
    "Sft",
    "Sql",
    "Student",
    "Tenant",
    "Tracking",
    "Trainer",
    "Validate",
    "explain",
    "load_profile",
    "profile_names",
    "require_secret",
    "uses_proxy",
]
