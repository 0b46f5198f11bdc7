"""Writes docs/options.md from the option dataclasses: `make docs`."""

from __future__ import annotations

import ast
import inspect
import textwrap
from dataclasses import MISSING, Field, fields
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

from gapless.config.options import EngineOptions
from gapless.core.grammar import Grammar
from gapless.core.sampling_params import SamplingParams
from gapless.server.options import ServerOptions

if TYPE_CHECKING:
    from collections.abc import Sequence

PAGE = Path(__file__).parents[1] / "docs" / "options.md"

# what the package itself reads from the environment: name to meaning
OWN_VARIABLES: dict[str, str] = {
    "GAPLESS_API_KEY": "key that `gapless serve` asks for, and that `gapless bench serve` sends",
    "NCCL_NVLS_ENABLE": "1 lets NCCL use NVLink multicast with `--tp`; off where it is not set",
}
# what its libraries read, of use here
LIBRARY_VARIABLES = {
    "HF_HOME": "huggingface_hub: where downloaded checkpoints are kept",
    "HF_HUB_OFFLINE": "huggingface_hub: 1 forbids downloads, so that only kept checkpoints serve",
    "HF_TOKEN": "huggingface_hub: token for gated and private checkpoints",
    "CUDA_VISIBLE_DEVICES": "torch: which GPUs there are",
    "OMP_NUM_THREADS": "torch: threads of the CPU device, unless `--num-threads` is given",
}

HEAD = """# Options

Written by `make docs` from the code; edit the dataclasses instead.

Each option is declared once. Its flag is its name with dashes; in Python it is a keyword argument.
"""
ENGINE = """## Engine

`EngineOptions`: keyword arguments of `LLM`, and flags of every command. `None` and `auto` mean that
the engine chooses, and says why with `--log-level info`.
"""
SAMPLING = """## Sampling

`SamplingParams`: how a request chooses its tokens and when it ends. The same names are flags of
`gapless generate` and `gapless chat`, but for `seed`, which there is the engine's, and `grammar`,
which is Python's and the server's. These two are greedy unless told otherwise: `--temperature 0`.
Without parameters, `LLM` takes the checkpoint's own from its generation_config.json.
"""
SERVER = """## Server

`ServerOptions`: more flags of `gapless serve`; see [server.md](server.md).
"""
ENVIRONMENT = """## Environment variables

{own}

Libraries underneath read, among others:
"""


def render() -> str:
    """Return the whole page."""
    own = "gapless reads none of its own."
    if OWN_VARIABLES:
        own = _table(
            ("variable", "meaning"),
            [(f"`{name}`", meaning) for name, meaning in OWN_VARIABLES.items()],
        )
    library = [(f"`{name}`", meaning) for name, meaning in LIBRARY_VARIABLES.items()]
    parts = [HEAD]
    for intro, options in (
        (ENGINE, EngineOptions),
        (SAMPLING, SamplingParams),
        (SERVER, ServerOptions),
    ):
        parts += [intro, _table(("flag", "type", "default", "meaning"), option_rows(options))]
    parts += [ENVIRONMENT.format(own=own), _table(("variable", "meaning"), library)]
    return "\n".join(parts)


def option_rows(options: type[Any]) -> list[tuple[str, ...]]:
    """Flag, type, default and meaning of each field of a dataclass, in order."""
    hints, meanings = get_type_hints(options), field_docs(options)
    return [
        (
            f"`--{field.name.replace('_', '-')}`",
            _type_name(hints[field.name]),
            f"`{_default(field)}`",
            meanings[field.name],
        )
        for field in fields(options)
    ]


def field_docs(options: type[Any]) -> dict[str, str]:
    """Return the string under each field of a dataclass, on one line."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(options)))
    (body,) = [node.body for node in tree.body if isinstance(node, ast.ClassDef)]
    found = {}
    for node, below in pairwise(body):
        match node, below:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                found[name] = " ".join(text.split())
    return found


def _type_name(hint: Any) -> str:
    """Name a type as one would say it; `X | None` is X, since the default says None."""
    arguments = [argument for argument in get_args(hint) if argument is not type(None)]
    if get_origin(hint) is Literal:
        return ", ".join(f"`{argument}`" for argument in arguments)
    if get_origin(hint) is tuple:
        return f"list of {_type_name(arguments[0])}"
    if get_origin(hint) is dict:
        return "pairs of " + " and ".join(_type_name(argument) for argument in arguments)
    if arguments:
        return " or ".join(_type_name(argument) for argument in arguments)
    names = {str: "text", int: "integer", float: "number", bool: "yes or no", Grammar: "`Grammar`"}
    return names[hint]


def _default(field: Field[Any]) -> str:
    assert field.default is not MISSING, f"{field.name} has no plain default"
    return str(field.default)


def _table(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [heads, ("---",) * len(heads), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
