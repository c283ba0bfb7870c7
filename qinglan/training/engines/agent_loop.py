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
    # verl hands over numpy's integers, which print differently.
    step = int(sample["global_steps"])
    prompt = int(sample["index"])
    number = int(sample["session_id"])
    return zlib.crc32(repr([run_seed, step, prompt, number]).encode())


class SeededSingleTurn(SingleTurnAgentLoop):
    """verl's agent loop with a `seed` for each sample."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        rollout = self.rollout_config
        if rollout.full_determinism:
            # verl then makes the request's id of the priority, which it does not set itself.
            first_of_prompt = int(kwargs["index"]) * rollout.n
            kwargs["priority"] = first_of_prompt + int(kwargs["session_id"])
        seeded_params = sampling_params | {"seed": sample_seed(rollout.seed, kwargs)}
        return await super().run(seeded_params, **kwargs)
