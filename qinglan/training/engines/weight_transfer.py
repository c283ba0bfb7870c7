"""verl's trainer half of the vLLM rollout, with a time limit on each message to vLLM, on GPUs as well.

verl 0.9.1 waits for ever where vLLM could not take the weights: the error is in a Ray reference at which it would look
next, after a receive without a limit.
"""

# mypy: allow-subclassing-any, allow-untyped-calls, disable-error-code="attr-defined"

import os
from typing import Any

import zmq
from verl.workers.rollout.vllm_rollout import ServerAdapter

from qinglan.errors import EngineError

WITHIN_S = int(os.environ.get("QINGLAN_WEIGHTS_WITHIN_S", "600"))
"""For one bucket of weights (`rollout.checkpoint_engine.update_weights_bucket_megabytes`)."""


class TimedServerAdapter(ServerAdapter):
    async def update_weights(self, *args: Any, **kwargs: Any) -> None:
        context: zmq.Context[Any] = (
            zmq.Context.instance()
        )  # verl makes its socket of it, which takes these options over
        limits: dict[int, int] = {zmq.RCVTIMEO: 1000 * WITHIN_S, zmq.SNDTIMEO: 1000 * WITHIN_S, zmq.LINGER: 0}
        before = dict(context.sockopts)
        context.sockopts.update(limits)
        try:
            await super().update_weights(*args, **kwargs)
        except zmq.Again:
            raise EngineError(f"vLLM did not take the weights within {WITHIN_S} s; its log says why") from None
        finally:
            context.sockopts = before
