"""The section `rag`: where the retrieval service is, how it is asked, and how its answer is read.

`rag.yaml` says for each preset what differs from Qinglan's own contract, which is the default of
every field here.
"""

import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Self, cast, get_args

import yaml
from pydantic import AfterValidator, Field, JsonValue, model_validator

from qinglan.config.base import (
    EMBEDDED,
    Count,
    LocalPath,
    Positive,
    SecretName,
    Section,
    Share,
    Url,
)

RagPreset = Literal[
    "qinglan", "dify", "ragflow", "fastgpt", "chatchat", "elasticsearch", "qdrant", "milvus"
]
TEXT = "{text}"
REWRITTEN_QUERY = "{rewritten_query}"
PLACEHOLDERS = (
    TEXT,
    "{query}",
    REWRITTEN_QUERY,
    "{top_k}",
    "{score_threshold}",
    "{tenant_id}",
    "{kb_name}",
)


# Read once: every profile that names a preset asks for it.
@functools.cache
def _presets() -> dict[str, dict[str, Any]]:
    text = Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
    return cast(dict[str, dict[str, Any]], yaml.safe_load(text))


def _texts_in(template: JsonValue) -> Iterator[str]:
    """The texts that are values in it, at any depth."""
    if isinstance(template, str):
        yield template
    elif isinstance(template, dict):
        yield from _texts_in(list(template.values()))
    elif isinstance(template, list):
        for part in template:
            yield from _texts_in(part)


def _check_placeholders(request: dict[str, JsonValue]) -> dict[str, JsonValue]:
    texts = set(_texts_in(request))
    for text in texts - {*PLACEHOLDERS}:
        if re.fullmatch(r"\{\w+\}", text):
            raise ValueError(f"there is no placeholder {text}; there are {', '.join(PLACEHOLDERS)}")
        if any(placeholder in text for placeholder in PLACEHOLDERS):
            raise ValueError(
                f"{text!r}: a placeholder must be a whole value, without other text beside it"
            )
    if texts.isdisjoint({TEXT, REWRITTEN_QUERY}):
        raise ValueError(
            f"holds neither {TEXT} nor {REWRITTEN_QUERY}, so that no rewrite would be sent; add one"
        )
    return request


def _check_jmespath(expression: str) -> str:
    # 20 ms, which only a profile with such a setting needs.
    import jmespath

    try:
        jmespath.compile(expression)
    except jmespath.exceptions.JMESPathError as error:
        said = str(error).splitlines()[0]
        raise ValueError(
            f"{expression!r} is no JMESPath: {said}; see https://jmespath.org"
        ) from error
    return expression


JmesPath = Annotated[str, AfterValidator(_check_jmespath)]


class RagMapping(Section):
    """The shape of the retrieval service's requests and answers.

    The defaults are Qinglan's own contract. What a profile does not say here is as in its
    `rag.preset`; docs/how-to/rag.md has examples.
    """

    request: Annotated[dict[str, JsonValue], AfterValidator(_check_placeholders)] = {
        "query": "{query}",
        "tenant_id": "{tenant_id}",
        "kb_name": "{kb_name}",
        "top_k": "{top_k}",
        "score_threshold": "{score_threshold}",
        "rewritten_query": "{rewritten_query}",
    }
    """The JSON object that is posted; it replaces the preset's whole request.

    These values are placeholders: `{text}` is the rewrite, or the question where there is none;
    `{query}` is always the question; a key with `{rewritten_query}` is left out where there is no
    rewrite; `{top_k}`, `{score_threshold}`, `{tenant_id}` and `{kb_name}` are the profile's.
    """
    passages: JmesPath = "data.recall"
    """JMESPath of the list of passages in the answer, best first; `@` where the answer itself is
    the list."""
    id: JmesPath = "id"
    """JMESPath of the document's id in a passage: what the workbook's gold column names."""
    title: JmesPath = "title"
    content: JmesPath = "content"
    score: JmesPath = "reranker_score"
    score_as: Literal["as_is", "sigmoid", "divide_by", "rank"] = "as_is"
    """Way from the score to one in [0, 1].

    `as_is`: it is one already. `sigmoid`: it is a logit. `divide_by`: it is divided by `divide_by`.
    `rank`: it does not count, and the passages get 1, 1/2, 1/3, … by their position.
    """
    divide_by: Positive | None = None
    """The highest score that the service gives, for `score_as: divide_by`."""
    key_header: str = "authorization"
    """Header that carries the key of `rag.api_key_env`."""
    key_prefix: str = "Bearer "
    """Text before the key in that header."""

    @model_validator(mode="after")
    def _divide_where_it_is_said(self) -> Self:
        divides = self.score_as == "divide_by"
        has_divisor = self.divide_by is not None
        if divides != has_divisor:
            raise ValueError(
                "`score_as: divide_by` and a number in `divide_by` belong together; "
                "give both or neither"
            )
        return self

    @property
    def takes_rewrite(self) -> bool:
        """Does the service get question and rewrite apart, as one that rewrites by itself needs
        it?"""
        return REWRITTEN_QUERY in _texts_in(self.request)


class Rag(Section):
    """The retrieval service (see docs/how-to/rag.md)."""

    url: Url = EMBEDDED
    """Address that takes the POST, or `embedded` for the BM25 simulator; `{kb_name}` in it stands
    for `rag.kb_name`."""
    preset: RagPreset = "qinglan"
    """Shape of requests and answers: Qinglan's own contract, or that of one of these products."""
    mapping: RagMapping = RagMapping()
    knowledge_base: LocalPath = EMBEDDED
    """JSONL (id, title, content) that the embedded RAG serves; `embedded` is the shipped sample.
    Unused otherwise."""
    kb_name: str = "default"
    top_k: Count = 10
    score_threshold: Share = 0.0
    timeout_s: Positive = 20
    max_retries: Annotated[int, Field(ge=0)] = 4
    concurrency: Count = 16
    api_key_env: SecretName | None = None
    """Name of the environment variable that holds the service's key, where it wants one."""

    @model_validator(mode="before")
    @classmethod
    def _lay_mapping_over_preset(cls, values: Any) -> Any:
        # What is not as it should be is left for the fields' own checks to refuse.
        if not isinstance(values, dict):
            return values
        preset = values.get("preset", "qinglan")
        if preset == "qinglan" or preset not in get_args(RagPreset):
            return values
        mapping = values.get("mapping") or {}
        if not isinstance(mapping, dict):
            return values
        return {**values, "mapping": {**_presets()[preset], **mapping}}

    @property
    def answer_key(self) -> dict[str, Any]:
        """The settings that an answer depends on, beside the texts."""
        settings = self.model_dump(
            mode="json", include={"url", "kb_name", "top_k", "score_threshold"}
        )
        # Qinglan's own contract is left out, so that its keys stay.
        mapping = self.model_dump(mode="json", include={"mapping"}, exclude_defaults=True)
        return settings | mapping
