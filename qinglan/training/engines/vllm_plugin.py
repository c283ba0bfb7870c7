"""A vLLM plug-in (entry-point group `vllm.general_plugins`) for the CPU, without a patch of vLLM's
code; idle on GPUs.

On the CPU vLLM packs a linear layer's weight for oneDNN and empties the parameter, so that nothing
can be loaded into it later, which verl does after every step. A layer with `skip_weight_relayout`
multiplies by its parameter instead, and `register_oot` is vLLM's way to replace a layer's class.
"""

_LAYERS = (
    "ReplicatedLinear",
    "ColumnParallelLinear",
    "MergedColumnParallelLinear",
    "QKVParallelLinear",
    "RowParallelLinear",
)


def register() -> None:
    """Replace the layers; vLLM calls this in each of its processes, in some of them twice."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot
    from vllm.model_executor.layers import linear
    from vllm.model_executor.models.utils import WeightsMapper

    for name in _LAYERS:
        if name in op_registry_oot:
            continue
        attributes = {"skip_weight_relayout": True, "__module__": __name__}
        layer = type(name, (getattr(linear, name),), attributes)
        PluggableLayer.register_oot(layer, name=name)
    # verl 0.9.1 sends adapters with the help of a method that vLLM 0.30 has renamed.
    if not hasattr(WeightsMapper, "get_unstacked_mapper"):
        WeightsMapper.get_unstacked_mapper = WeightsMapper.get_rename_mapper
