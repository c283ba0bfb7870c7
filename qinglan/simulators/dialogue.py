"""Dialogues as the base models read them in pretraining: in Qwen's chat format."""


def chat(*turns: str, system: str | None = None) -> str:
    """A dialogue, user first."""
    opening = "" if system is None else _turn("system", system)
    roles = ("user", "assistant")
    return opening + "".join(_turn(roles[n % 2], text) for n, text in enumerate(turns))


def _turn(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"
