"""The registry of trained models: MLflow's, with three aliases that say what serves.

`champion` answers, `previous` is what a rollback returns to, `challenger` is what a canary tries.
Every version keeps what it was made of, in `release.json`, and the gate's decision; a refused one
is kept without an alias.
"""

from qinglan.registry.store import Registry, champion_of, registry_of, rival_of
from qinglan.registry.versions import ALIASES, Alias, Candidate, Released, prompt_digest

__all__ = [
    "ALIASES",
    "Alias",
    "Candidate",
    "Registry",
    "Released",
    "champion_of",
    "prompt_digest",
    "registry_of",
    "rival_of",
]
