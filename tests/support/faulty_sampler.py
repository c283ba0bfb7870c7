"""A vLLM worker that loses weights, for tests.

It takes the place of verl's (`engine_kwargs.vllm.worker_extension_cls`).
"""

from typing import Any

from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

REFUSED = 5
"""The transfer that fails. Of those before it only the first one's weights are taken."""


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
