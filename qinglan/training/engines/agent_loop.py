"""verl's single-turn agent loop, in which every sample draws its tokens from a random stream of its
own.

The stream is named by the run's seed, the step, the prompt and the sample's number among the
prompt's samples, so that it depends neither on the batch nor on the server. verl's
`rollout.full_determinism` alone would give one seed to all samples of a prompt, and GRPO would
compare equal answers.
"""

# mypy: allow-subclassing-any, allow-untyped-calls

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

AGENTS_FILE = Path(__file__).with_name("agents.yaml")
"""`rollout.agent.agent_loop_config_path`, which names the class below `seeded_single_turn`."""


def sample_seed(run_seed: int, sample: Mapping[str, Any]) -> int:
    """A seed below 2³² for one sample, given verl's fields of it."""
    names = ("global_steps", "index", "session_id")
    return zlib.crc32(repr([run_seed, *(int(sample[name]) for name in names)]).encode())


class SeededSingleTurn(SingleTurnAgentLoop):
    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        if (
            self.rollout_config.full_determinism
        ):  # then verl makes the request's id of it, and gives none itself
            kwargs["priority"] = int(kwargs["index"]) * self.rollout_config.n + int(
                kwargs["session_id"]
            )
        return await super().run(
            sampling_params | {"seed": sample_seed(self.rollout_config.seed, kwargs)}, **kwargs
        )
