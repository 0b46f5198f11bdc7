"""Tool calls in a model's text, found as the text comes.

Two styles: `hermes`, `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, and `qwen3_coder`,
`<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`. Arguments come
out as the text of one JSON object, in pieces, as soon as they are certain. However the text is cut,
the events say the same. Text that is no call after all stays text.
"""

from gapless.text.tools.events import (
    CallArguments,
    CallBegin,
    CallBroken,
    CallEnd,
    Text,
    ToolEvent,
)
from gapless.text.tools.parser import ToolParser, ToolStyle, style_of_template

__all__ = [
    "CallArguments",
    "CallBegin",
    "CallBroken",
    "CallEnd",
    "Text",
    "ToolEvent",
    "ToolParser",
    "ToolStyle",
    "style_of_template",
]
