"""Requests, as they come in: a field that is not here is refused by its name."""

from __future__ import annotations

from typing import Any, Literal, TypeVar

import msgspec

from ..engine.sampling_params import SamplingParams
from .errors import RequestError


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """``include_usage``: a last chunk without choices tells the usage."""

    include_usage: bool | None = None


class Sampling(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What chat and plain completions have in common."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    n: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[str, float] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int | None = None
    """The lower goes first; 0 is the default."""
    cache_salt: str | None = None
    """Requests find only what others with the same salt have computed."""
    user: str | None = None
    """A name for whoever asks: it changes nothing."""

    def sampling(self, *, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        """
        Raises:
            RequestError: a setting is out of its range.
        """
        try:
            bias = {int(token): value for token, value in (self.logit_bias or {}).items()}
        except ValueError:
            raise RequestError(400, "logit_bias: a token id is a whole number", param="logit_bias") from None
        try:
            return SamplingParams(
                max_tokens=max_tokens,
                temperature=self.temperature,
                top_k=self.top_k,
                top_p=self.top_p,
                min_p=self.min_p,
                repetition_penalty=self.repetition_penalty,
                presence_penalty=self.presence_penalty,
                frequency_penalty=self.frequency_penalty,
                n=self.n,
                seed=self.seed,
                stop=self.stop,
                stop_token_ids=self.stop_token_ids,
                ignore_eos=self.ignore_eos,
                logprobs=logprobs,
                logit_bias=bias or None,
            )
        except ValueError as error:
            name = str(error).partition(" ")[0].rstrip(":")
            raise RequestError(400, str(error), param=name) from None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class CompletionRequest(Sampling, kw_only=True):
    """``POST /v1/completions``."""

    prompt: str | list[str | int | list[int]]
    """A text, token ids, or a list of either."""
    echo: bool | None = None
    logprobs: int | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """
        Raises:
            RequestError: there is none, or ids stand beside prompts.
        """
        if isinstance(self.prompt, str):
            return [self.prompt]
        ids = [item for item in self.prompt if isinstance(item, int)]
        prompts = [item for item in self.prompt if not isinstance(item, int)]
        if ids and prompts:
            raise RequestError(400, "prompt has token ids beside prompts in one list", param="prompt")
        if not ids and not prompts:
            raise RequestError(400, "prompt is an empty list", param="prompt")
        return [ids] if ids else prompts


class ChatTemplateArguments(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What of the chat template may be set."""

    enable_thinking: bool | None = None


class JsonSchema(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A schema that the answer keeps, strictly or not asked for so."""

    schema: dict[str, Any]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What the answer is, from the end of its thinking on."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class ChatRequest(Sampling, kw_only=True):
    """``POST /v1/chat/completions``."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: ChatTemplateArguments | None = None
    reasoning_effort: Literal["none"] | None = None
    response_format: ResponseFormat | None = None

    @property
    def most_tokens(self) -> int | None:
        """
        Raises:
            RequestError: both names are used, with two values.
        """
        one, other = self.max_tokens, self.max_completion_tokens
        if one is not None and other is not None and one != other:
            raise RequestError(
                400,
                f"max_tokens is {one} and max_completion_tokens {other}: they are one setting",
                param="max_completion_tokens",
            )
        return one if other is None else other

    @property
    def schema(self) -> tuple[dict[str, Any], str] | None:
        """The schema that the answer keeps, and the field that it is of.

        Raises:
            RequestError: there is a schema without its type, or the type without one.
        """
        wanted = self.response_format
        if wanted is None:
            return None
        if (wanted.type == "json_schema") != (wanted.json_schema is not None):
            raise RequestError(
                400, "response_format: json_schema stands with type json_schema", param="response_format"
            )
        if wanted.json_schema is not None:
            return wanted.json_schema.schema, "response_format.json_schema.schema"
        return ({"type": "object"}, "response_format") if wanted.type == "json_object" else None

    @property
    def enable_thinking(self) -> bool | None:
        if self.reasoning_effort == "none":
            return False
        return None if self.chat_template_kwargs is None else self.chat_template_kwargs.enable_thinking


class TokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """``POST /tokenize``."""

    prompt: str
    model: str | None = None


class DetokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """``POST /detokenize``."""

    tokens: list[int]
    model: str | None = None


Request = TypeVar("Request")


def decode(body: bytes, kind: type[Request]) -> Request:
    """A request of a kind.

    Raises:
        RequestError: it is none; the message names the field.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        message = str(error)
        raise RequestError(400, message, param=_field(message)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(400, f"the body is not valid JSON: {error}") from None


def _field(message: str) -> str | None:
    """The field that a message of msgspec is about: ``... field `x` `` or ``... - at `$.x` ``."""
    quoted = message.split("`")
    if "field `" in message:
        return quoted[1 + 2 * [part.endswith("field ") for part in quoted[::2]].index(True)]
    if "at `$." in message:
        return quoted[-2].removeprefix("$.")
    return None
