"""What is shipped beside the code: the demo model whole, its data, its notices, one set of pins."""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from importlib import resources
from pathlib import Path

import pytest

from gapless.assets import demo_checkpoint, heldout

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
MODEL_BYTES = 16_000_544
MODEL_SHA256 = "15053917c4bac9a6dae64bff35f132f10160bc2281d47c37db3a0ad2fd3d017f"
NUM_PARAMETERS = 7_993_648


def requirement_names(requirements: list[str]) -> set[str]:
    """Return the distribution names of requirement strings, normalised."""
    names = {re.match(r"[\w.-]+", requirement)[0] for requirement in requirements}
    return {re.sub(r"[._-]+", "-", name).lower() for name in names}


def test_demo_weights_are_whole() -> None:
    weights = (demo_checkpoint() / "model.safetensors").read_bytes()
    assert len(weights) == MODEL_BYTES
    assert hashlib.sha256(weights).hexdigest() == MODEL_SHA256


def test_demo_weights_have_every_parameter() -> None:
    with (demo_checkpoint() / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    sizes = [
        entry["data_offsets"][1] - entry["data_offsets"][0]
        for name, entry in header.items()
        if name != "__metadata__"
    ]
    assert sum(sizes) == 2 * NUM_PARAMETERS


@pytest.mark.parametrize(
    ("name", "num_lines", "fields"),
    [
        ("level1", 500, {"question", "answer", "n", "family", "steps"}),
        ("level2", 200, {"question", "answer", "n", "family", "steps"}),
        ("text", 35, {"text"}),
    ],
)
def test_heldout_data_is_whole(name: str, num_lines: int, fields: set[str]) -> None:
    items = [json.loads(line) for line in heldout(name).read_text().splitlines()]
    assert len(items) == num_lines
    assert all(set(item) == fields for item in items)


def test_demo_files_are_package_data() -> None:
    assets = Path(str(resources.files("gapless.assets")))
    present = {path for path in (assets / "demo").rglob("*") if path.is_file()}
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["gapless.assets"]
    shipped = {path for pattern in patterns for path in assets.glob(pattern)}
    assert shipped == present
    assert demo_checkpoint() / "model.safetensors" in shipped
    assert assets / "demo" / "NOTICE" in shipped


def test_notice_carries_the_licences_of_the_corpus() -> None:
    notice = (demo_checkpoint().parent / "NOTICE").read_text()
    for phrase in [
        "PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2",
        "WordNet 3.0 Copyright 2006 by Princeton University.  All rights reserved.",
        "Open Knowledge Foundation",
        "License 2.5 (http://creativecommons.org/licenses/by/2.5/legalcode)",
    ]:
        assert phrase in notice
    assert "Apache License" in (ROOT / "LICENSE").read_text()


def test_every_requirement_is_pinned() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines)
    project = PROJECT["project"]
    wanted = requirement_names(project["dependencies"])
    for requirements in project["optional-dependencies"].values():
        wanted |= requirement_names(requirements)
    assert wanted - {"gapless"} <= requirement_names(lines)
