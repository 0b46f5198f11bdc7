"""Imports point down the list of packages; packages that decide on the host load no torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "gapless"

# packages that each one may import, beside itself; `gapless` is the package's own __init__
_BASE = {"core", "config", "errors", "observe"}
_OPS = _BASE | {"ops", "text"}
_LAYERS = _OPS | {"attention"}
_MODELS = _LAYERS | {"layers"}
_MEMORY = _MODELS | {"models"}
_STEP = _MEMORY | {"speculative", "cache"}
_ENGINE = _STEP | {"scheduler", "runner", "assets"}
_PROGRAMS = _ENGINE | {"engine", "gapless"}
ALLOWED = {
    "errors": set(),
    "assets": set(),
    "observe": {"errors"},
    "core": {"errors"},
    "config": {"core", "errors", "observe", "assets"},
    "ops": _BASE,
    "text": _BASE,
    "attention": _OPS,
    "layers": _LAYERS,
    "models": _MODELS,
    "speculative": _MEMORY,
    "cache": _MEMORY,
    "scheduler": _STEP,
    "runner": _STEP,
    "engine": _ENGINE,
    "gapless": _ENGINE | {"engine"},
    "server": (_PROGRAMS - {"assets"}) | {"bench", "eval"},
    "bench": _PROGRAMS | {"server", "eval"},
    "eval": _PROGRAMS | {"server", "bench"},
    "cli": _PROGRAMS | {"server", "bench", "eval"},
}
TORCH_FREE = {"cache", "scheduler", "text", "server", "config", "core", "errors", "observe"}
# the one module of a torch-free package that describes tensors
WITH_TORCH = {"gapless.core.batch"}
TORCH_PACKAGES = {"torch", "triton", "transformers", "fla", "flashinfer", "gapless.ops"}
# packages whose import, submodules included, must leave torch out of the process
LIGHT = ["gapless.scheduler", "gapless.cache", "gapless.text", "gapless.config"]
LIGHT += ["gapless", "gapless.core", "gapless.errors", "gapless.observe", "gapless.assets"]
LIGHT += ["gapless.server"]


def module_name(path: Path) -> str:
    """Return the dotted name of a file of the package."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(source: str, package: str) -> set[str]:
    """Return the dotted names that `source`, in `package`, imports anywhere, lazily too.

    `from a import b` gives `a.b`, since `b` may be a module.
    """
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, *([base] if base else [])])
            found |= {f"{base}.{alias.name}" for alias in node.names}
    return found


def part_of(name: str) -> str | None:
    """Return the part of gapless that a dotted name lies in, None outside of gapless."""
    first, *rest = name.split(".")
    if first != "gapless":
        return None
    return rest[0] if rest and rest[0] in ALLOWED else "gapless"


def wrong_imports(source: str, name: str, *, is_package: bool = False) -> set[str]:
    """Return the imports of module `name` that point up or sideways."""
    own = part_of(name)
    package = name if is_package else name.rpartition(".")[0]
    parts = {target: part_of(target) for target in imported_modules(source, package)}
    return {
        target
        for target, part in parts.items()
        if part not in (None, own) and part not in ALLOWED[own]
    }


def torch_imports(source: str, name: str) -> set[str]:
    """Return the imports of torch, or of what needs torch, in module `name`."""
    package = name.rpartition(".")[0]
    return {
        target
        for target in imported_modules(source, package)
        if any(f"{target}.".startswith(f"{banned}.") for banned in TORCH_PACKAGES)
        or target.startswith("safetensors.torch")
    }


MODULES = sorted(PACKAGE.rglob("*.py"))


def test_every_package_has_its_place() -> None:
    parts = {path.name.removesuffix(".py") for path in PACKAGE.iterdir() if path.suffix == ".py"}
    parts |= {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert parts - {"__init__"} <= set(ALLOWED)


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_imports_point_down(path: Path) -> None:
    name = module_name(path)
    wrong = wrong_imports(path.read_text(), name, is_package=path.name == "__init__.py")
    assert not wrong, f"{name} may import of gapless only {sorted(ALLOWED[part_of(name)])}"


@pytest.mark.parametrize(
    "path",
    [p for p in MODULES if part_of(module_name(p)) in TORCH_FREE | {"assets", "gapless"}],
    ids=module_name,
)
def test_torch_free_modules_import_no_torch(path: Path) -> None:
    name = module_name(path)
    assert name in WITH_TORCH or not torch_imports(path.read_text(), name)


@pytest.mark.parametrize("package", LIGHT)
def test_torch_free_packages_load_without_torch(package: str) -> None:
    names = [n for n in map(module_name, MODULES) if f"{n}.".startswith(f"{package}.")]
    # for `gapless` itself the point is that its public names are loaded on use
    names = [package] if package == "gapless" else sorted(set(names) - WITH_TORCH)
    assert names, f"{package} has no modules"
    script = f"import sys\nimport {', '.join(names)}\nsys.exit('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr or f"importing {names} imports torch"


@pytest.mark.parametrize(
    ("name", "source", "wrong"),
    [
        ("gapless.ops.norm", "import gapless.text.chat", {"gapless.text.chat"}),
        ("gapless.ops.norm", "from gapless import text", {"gapless.text"}),
        ("gapless.cache.pages", "from ..scheduler import policy", {"gapless.scheduler.policy"}),
        ("gapless.runner.graphs", "def f():\n  from gapless.engine import LLM",
         {"gapless.engine.LLM"}),
        ("gapless.core.plan", "if TYPE_CHECKING:\n  import gapless.config.options",
         {"gapless.config.options"}),
        ("gapless.layers.mlp", "from gapless import LLM", {"gapless.LLM"}),
        ("gapless.layers.mlp", "from gapless.ops.norm import rms\nfrom . import linear", set()),
        ("gapless.cli.main", "import gapless\nfrom gapless.server import app\nimport torch", set()),
        ("gapless.speculative.mtp", "from gapless.cache.rows import Rows",
         {"gapless.cache.rows.Rows"}),
    ],
)  # fmt: skip
def test_checker_finds_wrong_imports(name: str, source: str, wrong: set[str]) -> None:
    assert wrong_imports(source, name) == wrong


@pytest.mark.parametrize(
    ("source", "banned"),
    [
        ("from torch import Tensor", {"torch.Tensor"}),
        ("def f():\n  import torch.cuda", {"torch.cuda"}),
        ("from safetensors.torch import load_file", {"safetensors.torch.load_file"}),
        ("from gapless.ops import norm", {"gapless.ops.norm"}),
        ("import numpy, torchlike", set()),
    ],
)
def test_checker_finds_torch(source: str, banned: set[str]) -> None:
    assert torch_imports(source, "gapless.cache.pages") == banned
