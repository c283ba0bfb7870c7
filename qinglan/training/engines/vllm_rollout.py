"""verl's vLLM rollout, in which a failure ends the training, which then goes on from its
checkpoint; on GPUs as well.

verl 0.9.1 waits for ever where vLLM could not take the weights: the error is in a Ray reference at
which it would look next, after a receive without a limit. It waits for ever, too, for a server
whose engine's process has died.
"""

# mypy: allow-subclassing-any, allow-untyped-calls, disable-error-code="attr-defined,has-type"

import asyncio
import os
import time
from typing import Any

import psutil
import ray
import zmq
from verl.workers.rollout.vllm_rollout import ServerAdapter
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica

from qinglan.errors import EngineError
from qinglan.runs.launcher import remove_leaked_memory

WITHIN_S = int(os.environ.get("QINGLAN_WEIGHTS_WITHIN_S", "600"))
"""For one bucket of weights (`rollout.checkpoint_engine.update_weights_bucket_megabytes`)."""
_POLL_S = 2.0


def _job() -> str:
    """Names this training in the path of the socket for weights: the Ray that a run starts has
    01000000 as its job."""
    context = ray.get_runtime_context()
    return f"{context.get_job_id()}-{context.gcs_address.rpartition(':')[2]}"


class TimedServerAdapter(ServerAdapter):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.zmq_handle = self.zmq_handle.replace(ray.get_runtime_context().get_job_id(), _job())

    async def update_weights(self, *args: Any, **kwargs: Any) -> None:
        context: zmq.Context[Any] = (
            zmq.Context.instance()
        )  # verl makes its socket of it, with these options
        limits: dict[int, int] = {
            zmq.RCVTIMEO: 1000 * WITHIN_S,
            zmq.SNDTIMEO: 1000 * WITHIN_S,
            zmq.LINGER: 0,
        }
        before = dict(context.sockopts)
        context.sockopts.update(limits)
        try:
            await super().update_weights(*args, **kwargs)
        except zmq.Again:
            raise EngineError(
                f"vLLM did not take the weights within {WITHIN_S} s; its log says why"
            ) from None
        finally:
            context.sockopts = before


class EndingServer(vLLMHttpServer):
    """A server that ends with its engine, and first removes what killed attempts left in this
    node's shared memory."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Since this Ray started; what a run has only just made may not be mapped yet.
        remove_leaked_memory(psutil.Process(os.getppid()).create_time(), time.time() - 10)
        super().__init__(*args, **kwargs)
        os.environ["VERL_RAY_JOB_ID"] = _job()  # vLLM's workers make the path of it

    async def launch_server(self, *args: Any, **kwargs: Any) -> None:
        await super().launch_server(*args, **kwargs)
        if self.node_rank == 0:  # the others have no engine
            self._watch = asyncio.create_task(self._end_with_engine())

    async def _end_with_engine(self) -> None:
        while not self.engine.errored:  # noqa: ASYNC110 (vLLM tells nobody)
            await asyncio.sleep(_POLL_S)
        os._exit(1)


class EndingReplica(vLLMReplica):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.server_class = ray.remote(EndingServer)
