"""A profile: everything that a run depends on, as one YAML file read into frozen models.

Unknown keys are refused with the nearest right name. Secrets appear only as the *name* of an
environment variable. Engine settings keep the engines' own names where they are handed through
unchanged.
"""

from qinglan.config.base import EMBEDDED, uses_proxy
from qinglan.config.data import (
    BatchApi,
    Columns,
    Data,
    Dataset,
    Distill,
    Extract,
    NoiseKind,
    Select,
    Sql,
    Validate,
)
from qinglan.config.profile import (
    CHANGEABLE,
    ENGINE_FLOWS,
    TRAINING_FLOWS,
    FlowName,
    Profile,
    load_profile,
    parse_profile,
    profile_names,
    require_secret,
    secret_names,
    withheld_secrets,
)
from qinglan.config.rag import Rag, RagMapping, RagPreset
from qinglan.config.release import Canary, Gate, Serve
from qinglan.config.site import (
    Budget,
    Embedded,
    Endpoint,
    Judge,
    LedgerStore,
    LocalJudge,
    NotifyFormat,
    NotifyTopic,
    Paths,
    Price,
    Retention,
    Tenant,
    Tracking,
    Trainer,
)
from qinglan.config.training import AlarmAction, AlarmName, Alarms, Algorithm, Evaluate, Reward, Rl
