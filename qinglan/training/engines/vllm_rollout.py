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
"""Longest time for one bucket of weights
(`rollout.checkpoint_engine.update_weights_bucket_megabytes`)."""
_POLL_S = 2.0
_JUST_MADE_S = 10
"""Shared memory that is younger than this may be in use, though no process has mapped it yet."""


def _job() -> str:
    """Name of this training in the path of the socket for weights.

    The job's number alone would not do: in each Ray that a run starts for itself it is 01000000.
    """
    context = ray.get_runtime_context()
    return f"{context.get_job_id()}-{context.gcs_address.rpartition(':')[2]}"


class TimedServerAdapter(ServerAdapter):
    """Sends weights to vLLM, and raises where vLLM does not take them in time."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.zmq_handle = self.zmq_handle.replace(ray.get_runtime_context().get_job_id(), _job())

    async def update_weights(self, *args: Any, **kwargs: Any) -> None:
        # verl makes its socket of this process's one context, and a socket has the options that
        # its context has at that moment.
        context: zmq.Context[Any] = zmq.Context.instance()
        limits: dict[int, int] = {
            zmq.RCVTIMEO: 1000 * WITHIN_S,
            zmq.SNDTIMEO: 1000 * WITHIN_S,
            zmq.LINGER: 0,
        }
        options_before = dict(context.sockopts)
        context.sockopts.update(limits)
        try:
            await super().update_weights(*args, **kwargs)
        except zmq.Again:
            raise EngineError(
                f"vLLM did not take the weights within {WITHIN_S} s; its log says why"
            ) from None
        finally:
            context.sockopts = options_before


class EndingServer(vLLMHttpServer):
    """A server that ends with its engine, and first removes what killed attempts left in this
    node's shared memory."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Ray's own process is the parent of this one. Files from before it may belong to another
        # training on this machine.
        ray_started_at = psutil.Process(os.getppid()).create_time()
        remove_leaked_memory(ray_started_at, time.time() - _JUST_MADE_S)
        super().__init__(*args, **kwargs)
        # vLLM's workers make the path of the socket of it.
        os.environ["VERL_RAY_JOB_ID"] = _job()

    async def launch_server(self, *args: Any, **kwargs: Any) -> None:
        await super().launch_server(*args, **kwargs)
        # Only the first node's server has an engine.
        if self.node_rank == 0:
            self._watch = asyncio.create_task(self._end_with_engine())

    async def _end_with_engine(self) -> None:
        while not self.engine.errored:  # noqa: ASYNC110 (vLLM tells nobody)
            await asyncio.sleep(_POLL_S)
        os._exit(1)


class EndingReplica(vLLMReplica):
    """verl's controller side of vLLM's rollout, which starts `EndingServer`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.server_class = ray.remote(EndingServer)
