"""verl's critic without two assumptions that verl 0.9.1 makes about its model.

verl's loader asks for flash attention whatever the configuration says. Its adapter is meant for a model that generates,
and peft refuses it for a token classifier, whose head predicts the value; here the head is trained in full. A worker
that receives a `CriticModelConfig` imports this module, and thereby registers the engine with verl.
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
    """verl's configuration for a critic that may start from another model than the policy; `tokenizer_path` is the
    policy's."""

    def __post_init__(self) -> None:
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
    def _build_module(self) -> Any:
        model_config, config = self.model_config, self.model_config.hf_config
        config.num_labels, config.classifier_dropout = 1, 0.0
        dtype = PrecisionType.to_dtype(self.engine_config.model_dtype)
        on_first_rank = get_init_weight_context_manager(
            use_meta_tensor=not config.tie_word_embeddings, mesh=self.device_mesh
        )
        with on_first_rank():
            module = AutoModelForTokenClassification.from_pretrained(
                model_config.local_path,
                dtype=dtype,
                config=config,
                attn_implementation=model_config.override_config.get("attn_implementation", "sdpa"),
            )
            apply_monkey_patch(model=module, use_remove_padding=self.use_remove_padding, use_fused_kernels=False)
            module.to(dtype)
        if model_config.enable_gradient_checkpointing:
            module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return module

    def _build_lora_module(self, module: Any) -> Any:
        module.enable_input_require_grads()
        model_config = self.model_config
        adapter = LoraConfig(
            task_type=TaskType.TOKEN_CLS,
            r=model_config.lora_rank,
            lora_alpha=model_config.lora_alpha,
            target_modules=convert_to_regular_types(model_config.target_modules),
            exclude_modules=["score"],  # the head, which peft trains in full for this task
            bias="none",
        )
        return get_peft_model(module, adapter)
