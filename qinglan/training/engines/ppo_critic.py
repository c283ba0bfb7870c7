"""verl's critic without two assumptions that verl 0.9.1 makes about its model.

Its loader asks for flash attention whatever the configuration says. Its adapter is that of a model that generates,
which peft refuses for a token classifier, the head included that predicts the value; here the head is trained whole.

`CriticModelConfig` is named in verl's configuration. Every worker that is sent one imports this module, and thereby
registers the engine in the place that verl's registry keeps for a vendor's own.
"""

# mypy: allow-subclassing-any, allow-untyped-decorators, allow-untyped-calls

from dataclasses import dataclass
from typing import Any

from peft import LoraConfig, TaskType, get_peft_model
from transformers import AutoModelForTokenClassification, AutoTokenizer
from verl.models.transformers.monkey_patch import apply_monkey_patch
from verl.utils.fsdp_utils import get_init_weight_context_manager
from verl.utils.py_functional import convert_to_regular_types
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.config import HFModelConfig
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithValueHead

from qinglan.errors import EngineError


@dataclass
class CriticModelConfig(HFModelConfig):
    """verl's, for a model that may be another than the policy, whose tokenizer it names."""

    def __post_init__(self) -> None:
        """Refuse a critic that would read the policy's tokens as others."""
        super().__post_init__()
        if self.tokenizer_path == self.path:
            return
        own = AutoTokenizer.from_pretrained(self.local_path).get_vocab()
        if own != self.tokenizer.get_vocab():
            raise EngineError(
                f"critic {self.path} has another tokenizer than the policy, of {len(own)} tokens and not "
                f"{len(self.tokenizer)}; take rl.critic_model from the same family"
            )


@EngineRegistry.register(model_type="value_model", backend="fsdp2", device="cuda", vendor="nvidia")
class ValueEngine(FSDPEngineWithValueHead):
    """FSDP2 engine of a token classifier with one label."""

    def _build_module(self) -> Any:
        given, config = self.model_config, self.model_config.hf_config
        config.num_labels, config.classifier_dropout = 1, 0.0
        dtype = PrecisionType.to_dtype(self.engine_config.model_dtype)
        on_first_rank = get_init_weight_context_manager(
            use_meta_tensor=not config.tie_word_embeddings, mesh=self.device_mesh
        )
        with on_first_rank():
            module = AutoModelForTokenClassification.from_pretrained(
                given.local_path,
                dtype=dtype,
                config=config,
                attn_implementation=given.override_config.get("attn_implementation", "sdpa"),
            )
            apply_monkey_patch(model=module, use_remove_padding=self.use_remove_padding, use_fused_kernels=False)
            module.to(dtype)
        if given.enable_gradient_checkpointing:
            module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return module

    def _build_lora_module(self, module: Any) -> Any:
        module.enable_input_require_grads()
        given = self.model_config
        adapter = LoraConfig(
            task_type=TaskType.TOKEN_CLS,
            r=given.lora_rank,
            lora_alpha=given.lora_alpha,
            target_modules=convert_to_regular_types(given.target_modules),
            exclude_modules=["score"],  # the head, which peft trains whole for this task
            bias="none",
        )
        return get_peft_model(module, adapter)
