"""Which chat models take which parameters. A service answers 400 to one that its model does not know.

Sources: OpenAI's and DeepSeek's API references, vLLM's OpenAI-compatible server. The first pattern that fits decides;
whatever is served under another name (vLLM, a gateway) gets plain chat parameters.
"""

import re
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from qinglan.config import Endpoint

StructuredOutput = Literal["json_schema", "json_object", "off"]
JsonSchema = dict[str, Any]


@dataclass(frozen=True)
class Capability:
    """What the models of one family take."""

    pattern: str
    """Of the model's name without the organisation in front of a slash."""
    token_parameter: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"  # noqa: S105 (no secret)
    temperature: bool = True
    reasoning_effort: bool | None = False
    """None: unknown."""
    structured_output: StructuredOutput = "off"


TABLE = (
    Capability(r"gpt-5[^/]*-chat", "max_completion_tokens", structured_output="json_schema"),
    Capability(r"gpt-[5-9]|o\d", "max_completion_tokens", False, True, "json_schema"),
    Capability(r"gpt-4o|gpt-4\.1", structured_output="json_schema"),
    Capability(r"gpt-oss", reasoning_effort=True),
    Capability(r"deepseek-(chat|reasoner|flash|v\d)", structured_output="json_object"),
    Capability(r"", reasoning_effort=None),
)


@cache
def capability_of(model: str) -> Capability:
    name = model.rpartition("/")[2].lower()
    return next(each for each in TABLE if re.match(each.pattern, name))


def request_parameters(endpoint: Endpoint, schema: JsonSchema | None = None) -> dict[str, Any]:
    """What is sent beside the messages; `schema` is the JSON schema of the answer."""
    family = capability_of(endpoint.model)
    parameters: dict[str, Any] = {"model": endpoint.model, family.token_parameter: endpoint.max_tokens}
    if family.temperature:
        parameters["temperature"] = endpoint.temperature
    if endpoint.reasoning_effort:
        parameters["reasoning_effort"] = endpoint.reasoning_effort
    how = family.structured_output if endpoint.structured_output == "auto" else endpoint.structured_output
    if schema is not None and how == "json_schema":
        answer = {"name": "answer", "strict": True, "schema": schema}
        parameters["response_format"] = {"type": "json_schema", "json_schema": answer}
    elif schema is not None and how == "json_object":
        parameters["response_format"] = {"type": "json_object"}
    return parameters | endpoint.extra_body
