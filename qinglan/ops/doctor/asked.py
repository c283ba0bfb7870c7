"""Which chat services a flow asks."""

from qinglan.clients.roles import endpoint_of
from qinglan.config import Endpoint, FlowName, Profile
from qinglan.ops.preflight import asked_roles, further_teachers


def asked_endpoints(profile: Profile, flow: FlowName) -> dict[str, Endpoint]:
    """By role or setting; an answerer that the profile lacks is left out, as its own check says so."""
    roles = [role for role in asked_roles(profile, flow) if role != "answerer" or profile.answerer]
    return {role: endpoint_of(profile, role) for role in roles} | further_teachers(profile, flow)
