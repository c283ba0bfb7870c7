"""`qinglan up`: Prefect's server, MLflow's, the simulators, the deployments and the workers here, until Ctrl-C.

Every process is supervised, so that it ends with this one, kill -9 included. Prefect and MLflow are started and called
over HTTP, never imported. All listen on loopback only, and none sends telemetry.
"""

from qinglan.ops.prefect.deploy import DEPLOYMENTS
from qinglan.ops.up.serve import prefect_for, serve_site
from qinglan.ops.up.site import TRAINER_POOL, WORK_POOL, WORK_POOLS, Site

__all__ = [
    "DEPLOYMENTS",
    "TRAINER_POOL",
    "WORK_POOL",
    "WORK_POOLS",
    "Site",
    "prefect_for",
    "serve_site",
]
