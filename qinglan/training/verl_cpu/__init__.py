"""A CPU backend for verl, on verl's own extension points and without a patch.

verl imports this package in every process that it starts (entry-point group `verl.plugins`). Importing it registers
two things by name: the platform `cpu` (used where VERL_PLATFORM=cpu) and the rollout `hf_cpu`. The engines, workers
and trainer in `trainer` come with verl's heavy imports, so the PPO entry point loads them where they are needed.
On a GPU host the registrations stay unused.
"""

from verl.workers.rollout import base, replica

from qinglan.training.verl_cpu import platform as platform  # registers itself

ROLLOUT = "hf_cpu"
"""`actor_rollout_ref.rollout.name` of the CPU rollout."""
AGENT_LOOP = "qinglan.training.verl_cpu.trainer.LocalAgentLoopManager"
"""`actor_rollout_ref.rollout.agent.agent_loop_manager_class`."""
TRAINER = "cpu_sync"
"""`trainer.v1.trainer_mode` of the CPU trainer."""


def _replica_class() -> type:
    from qinglan.training.verl_cpu.rollout import CpuReplica

    return CpuReplica


replica.RolloutReplicaRegistry.register(ROLLOUT, _replica_class)
# The trainer's half of a rollout is looked up in a dictionary of class paths; verl offers no function to add one.
base._ROLLOUT_REGISTRY[(ROLLOUT, "async")] = "qinglan.training.verl_cpu.rollout.CpuRollout"
