"""`qinglan up`: Prefect's server, MLflow's, the simulators, the deployments and the workers here, until Ctrl-C.

Every process is supervised, so that it ends with this one, kill -9 included. Prefect and MLflow are started and called
over HTTP, never imported. All listen on loopback only, and none sends telemetry.
"""
