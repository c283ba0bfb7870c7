"""A vLLM worker for tests, in the place of verl's (`engine_kwargs.vllm.worker_extension_cls`), that
loses weights."""

from typing import Any

from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

REFUSED = 5
"""That transfer fails. Only the first one's weights are taken; those between are thrown away."""


class FaultyWorker(vLLMColocateWorkerExtension):
    transfers = 0

    def update_weights_from_ipc(self, *args: Any, **kwargs: Any) -> None:
        self.transfers += 1
        if self.transfers == REFUSED:
            raise MemoryError("no memory for the weights")
        super().update_weights_from_ipc(*args, **kwargs)

    def _update_weights(self, *args: Any, **kwargs: Any) -> None:
        if self.transfers == 1:
            super()._update_weights(*args, **kwargs)
