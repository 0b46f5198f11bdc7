"""Fields of clients' requests that the server has no use for, and which of them it lets pass.

A field that would change the answer is refused unless its value asks for nothing; what is left out
must not be found out from a wrong answer. Fields that never change an answer pass.
"""

from __future__ import annotations

import difflib
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from gapless.server.errors import ApiError

if TYPE_CHECKING:
    from collections.abc import Collection

# of OpenAI's API
INERT = frozenset(
    {
        "cache_control", "metadata", "prompt_cache_key", "prompt_cache_retention",
        "safety_identifier", "service_tier", "user",
    }
)  # fmt: skip
# names to the values that ask for nothing; those of OpenAI's API first, vLLM's and SGLang's last
NEUTRAL: dict[str, tuple[object, ...]] = {
    "audio": (),
    "best_of": (1,),
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
    "prediction": (),
    "reasoning_effort": ("none",),
    "store": (False,),
    "suffix": ("",),
    "verbosity": ("medium",),
    "web_search_options": (),
    # of responses and messages
    "background": (False,),
    "container": (),
    "context_management": (),
    "conversation": (),
    "include": ([],),
    "max_tool_calls": (),
    "mcp_servers": ([],),
    "output_config": ({},),
    "previous_response_id": (),
    "reasoning": ({},),
    "truncation": ("disabled",),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "cache_salt": (),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "ebnf": (),
    "guided_grammar": (),
    "include_stop_str_in_output": (False,),
    "json_schema": (),
    "kv_transfer_params": (),
    "length_penalty": (1,),
    "lora_path": (),
    "no_stop_trim": (False,),
    "priority": (0,),
    "prompt_logprobs": (),
    "regex": (),
    "return_hidden_states": (False,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}


def known_fields(body: dict[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Return the fields of `body` that are in `known` and not null.

    Raises:
        ApiError: another field asks for something, or nobody knows it.
    """
    found = {}
    for name, value in body.items():
        if value is None or name in INERT:
            continue
        if name in known:
            found[name] = value
        elif name in NEUTRAL:
            if value not in NEUTRAL[name]:
                raise _refusal(name, value)
        else:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "leave it out"
            raise ApiError(
                HTTPStatus.BAD_REQUEST, f"unrecognized request argument {name!r}; {hint}",
                param=name, code="unknown_parameter",
            )  # fmt: skip
    return found


def _refusal(name: str, value: object) -> ApiError:
    shown = repr(value)
    if len(shown) > 80:
        shown = f"{shown[:77]}..."
    neutral = " or ".join(repr(value) for value in NEUTRAL[name])
    hint = f", or send {neutral}" if neutral else ""
    return ApiError(
        HTTPStatus.BAD_REQUEST,
        f"{name}={shown} is not supported; leave it out{hint}",
        param=name,
        code="unsupported_parameter",
    )
