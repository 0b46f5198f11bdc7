"""The reader of config.json: two config generations, wrappers, and refusals that name the value."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from gapless.config.hf import GenerationDefaults, HfConfig, RopeParameters, read_hf_config
from gapless.errors import ModelError, UnsupportedModel

if TYPE_CHECKING:
    from pathlib import Path

BASE: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "rope_theta": 20000.0,
}


def write(directory: Path, config: Any, generation: Any = None) -> Path:
    (directory / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return directory


def read(directory: Path, **changes: Any) -> HfConfig:
    return read_hf_config(write(directory, BASE | changes))


def test_the_reader_imports_no_torch() -> None:
    code = "import sys, gapless.config.hf; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_directory_and_file_read_alike(tmp_path: Path) -> None:
    by_directory = read(tmp_path)
    assert by_directory == read_hf_config(tmp_path / "config.json")
    assert by_directory.path == tmp_path / "config.json"
    assert (by_directory.model_type, by_directory.wrapper_type) == ("qwen3", None)
    assert by_directory.max_position_embeddings == 512


def test_accessors_return_what_is_there(tmp_path: Path) -> None:
    config = read(tmp_path, hidden_act="silu", attention_bias=True, head_dim=None, scale=2)
    assert config.integer("hidden_size") == 64
    assert config.number("rms_norm_eps") == 1e-6
    assert config.number("scale") == 2.0
    assert config.string("hidden_act") == "silu"
    assert config.boolean("attention_bias") is True
    assert config.boolean("attention_bias", default=False) is True


def test_absent_and_null_take_the_default_or_none(tmp_path: Path) -> None:
    config = read(tmp_path, head_dim=None)
    for key in ("head_dim", "absent"):
        assert config.optional_integer(key) is None
        assert config.optional_string(key) is None
        assert config.integer(key, 16) == 16
        assert config.boolean(key, default=True) is True


@pytest.mark.parametrize(
    ("accessor", "value", "wanted"),
    [
        ("integer", "64", "integer"),
        ("integer", 64.0, "integer"),
        ("integer", True, "integer"),
        ("integer", -1, "at least 0"),
        ("integer", None, "integer"),
        ("optional_integer", [64], "integer"),
        ("integers", 1, "list of integers"),
        ("number", "0.1", "number"),
        ("number", False, "number"),
        ("number", {"__float__": "NaN"}, "finite number"),
        ("number", {"__float__": "-Infinity"}, "finite number"),
        ("string", 5, "string"),
        ("string", "", "string"),
        ("optional_string", [], "string"),
        ("boolean", 1, "true or false"),
        ("boolean", "true", "true or false"),
        ("boolean", None, "true or false"),
    ],
)
def test_wrong_values_name_file_key_found_and_wanted(
    tmp_path: Path, accessor: str, value: Any, wanted: str
) -> None:
    config = read(tmp_path, odd_key=value)
    with pytest.raises(ModelError, match=wanted) as caught:
        getattr(config, accessor)("odd_key")
    message = str(caught.value)
    assert "config.json" in message
    assert "odd_key" in message
    if value is None:
        assert "missing" in message
    elif not isinstance(value, dict):
        assert repr(value) in message


def test_a_default_does_not_hide_a_wrong_value(tmp_path: Path) -> None:
    config = read(tmp_path, odd_key="x")
    with pytest.raises(ModelError, match="odd_key"):
        config.integer("odd_key", 3)
    with pytest.raises(ModelError, match="odd_key"):
        config.boolean("odd_key", default=True)


def test_tagged_infinity_is_a_float_at_any_depth(tmp_path: Path) -> None:
    limit = [0.0, {"__float__": "Infinity"}]
    config = read(tmp_path, time_step_limit=limit, nested={"deep": {"__float__": "-Infinity"}})
    assert config.values["time_step_limit"] == [0.0, math.inf]
    assert config.values["nested"] == {"deep": -math.inf}


@pytest.mark.parametrize("name", ["bfloat16", "torch.bfloat16"])
@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_dtype_has_two_keys(tmp_path: Path, key: str, name: str) -> None:
    assert read(tmp_path, **{key: name}).dtype == "bfloat16"
    assert read(tmp_path).dtype is None
    with pytest.raises(ModelError, match=r"'int3'.*want one of float64"):
        _ = read(tmp_path, **{key: "int3"}).dtype


def test_missing_config_says_what_is_wanted(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json does not exist; want .*check the path"):
        read_hf_config(tmp_path)
    with pytest.raises(ModelError, match="does not exist"):
        read_hf_config(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b'{"a": 1,}', b"[1]", b'"x"', b"\xff\xfe{}", b'{"a": {"__float__": "x"}}'],
)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_damaged_files_are_named(tmp_path: Path, name: str, content: bytes) -> None:
    write(tmp_path, BASE)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelError, match=rf"/{name}.*(JSON).*download the checkpoint again"):
        read_hf_config(tmp_path)


@pytest.mark.parametrize("model_type", [None, 5, ""])
def test_model_type_is_needed(tmp_path: Path, model_type: Any) -> None:
    with pytest.raises(ModelError, match="model_type"):
        read(tmp_path, model_type=model_type)


def wrapped(text: dict[str, Any], **top: Any) -> dict[str, Any]:
    inner = {**BASE, "model_type": "qwen3_5_text", **text}
    return {"model_type": "qwen3_5", "vocab_size": 7, "image_token_id": 250, **top} | {
        "text_config": inner
    }


def test_text_config_is_merged_up_and_wins(tmp_path: Path) -> None:
    config = read_hf_config(write(tmp_path, wrapped({})))
    assert (config.model_type, config.wrapper_type) == ("qwen3_5_text", "qwen3_5")
    assert config.integer("vocab_size") == 256
    assert config.integer("image_token_id") == 250
    assert "text_config" not in config.values


@pytest.mark.parametrize("wrapper", ["qwen3_5", "qwen3_5_moe"])
def test_text_type_is_known_without_its_own_key(tmp_path: Path, wrapper: str) -> None:
    config = wrapped({}, model_type=wrapper)
    del config["text_config"]["model_type"]
    assert read_hf_config(write(tmp_path, config)).model_type == f"{wrapper}_text"
    flat = read(tmp_path, model_type=wrapper)
    assert (flat.model_type, flat.wrapper_type) == (f"{wrapper}_text", wrapper)


def test_unknown_wrapper_and_damaged_text_config_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="'llava'"):
        read_hf_config(write(tmp_path, wrapped({}, model_type="llava")))
    with pytest.raises(ModelError, match="text_config"):
        read_hf_config(write(tmp_path, {"model_type": "qwen3_5", "text_config": [1]}))


@pytest.mark.parametrize(
    ("text", "top", "expected"),
    [
        (None, None, False),
        (None, True, True),
        (None, False, False),
        (True, None, True),
        (False, None, False),
        (False, True, False),  # the text model's own word counts
        (True, False, True),
    ],
)
def test_ties_embeddings_from_text_part_or_wrapper(
    tmp_path: Path, *, text: bool | None, top: bool | None, expected: bool
) -> None:
    config = wrapped({"tie_word_embeddings": text}, tie_word_embeddings=top)
    assert read_hf_config(write(tmp_path, config)).ties_embeddings is expected


def test_ties_embeddings_in_a_flat_config(tmp_path: Path) -> None:
    assert read(tmp_path, tie_word_embeddings=True).ties_embeddings is True
    assert read(tmp_path).ties_embeddings is False
    with pytest.raises(ModelError, match="tie_word_embeddings is 'yes'"):
        read(tmp_path, tie_word_embeddings="yes")


V5_BLOCK = {"rope_type": "default", "rope_theta": 20000.0, "partial_rotary_factor": 0.25}
ROPE_STYLES: dict[str, dict[str, Any]] = {
    "v4": {"rope_theta": 20000.0, "partial_rotary_factor": 0.25},
    "v4, null scaling": {"rope_theta": 20000, "partial_rotary_factor": 0.25, "rope_scaling": None},
    "v4, default scaling": {
        "rope_theta": 20000.0,
        "partial_rotary_factor": 0.25,
        "rope_scaling": {"type": "default"},
    },
    "v4, mrope": {
        "rope_theta": 20000.0,
        "partial_rotary_factor": 0.25,
        "rope_scaling": {"type": "mrope", "rope_type": "default", "mrope_section": [2, 1, 1]},
    },
    "v5": {"rope_parameters": V5_BLOCK},
    "v5, mrope": {"rope_parameters": {**V5_BLOCK, "mrope_section": [2, 1, 1]}},
    "v5, factor outside": {
        "rope_parameters": {"rope_theta": 20000.0},
        "partial_rotary_factor": 0.25,
    },
    "both, v5 wins": {
        "rope_theta": 7.0,
        "partial_rotary_factor": 1.0,
        "rope_scaling": None,
        "rope_parameters": V5_BLOCK,
    },
    "both blocks, v5 wins": {
        "rope_scaling": {"rope_theta": 7.0, "partial_rotary_factor": 1.0},
        "rope_parameters": V5_BLOCK,
    },
    "both, v5 null": {
        "rope_theta": 20000.0,
        "partial_rotary_factor": 0.25,
        "rope_parameters": None,
    },
    "v5, null entries": {
        "rope_theta": 20000.0,
        "partial_rotary_factor": 0.25,
        "rope_parameters": {"rope_type": None, "rope_theta": None, "partial_rotary_factor": None},
    },
}


def rope_fields(rope: RopeParameters) -> tuple[float, float, str]:
    return rope.theta, rope.rotary_factor, rope.rope_type


@pytest.mark.parametrize("is_wrapped", [False, True])
@pytest.mark.parametrize("style", ROPE_STYLES)
def test_all_rope_styles_mean_the_same(tmp_path: Path, style: str, *, is_wrapped: bool) -> None:
    config = {key: value for key, value in BASE.items() if key != "rope_theta"}
    config |= ROPE_STYLES[style]
    if is_wrapped:
        text = config | {"model_type": "qwen3_5_text"}
        config = {"model_type": "qwen3_5", "text_config": text}
    rope = read_hf_config(write(tmp_path, config)).rope
    assert rope_fields(rope) == (20000.0, 0.25, "default")
    assert all(value is not None for value in rope.raw.values())


@pytest.mark.parametrize(
    ("model_type", "expected"),
    [("qwen3", 1.0), ("qwen3_next", 0.25), ("qwen3_5_text", 0.25), ("qwen3_5_moe_text", 0.25)],
)
def test_absent_rotary_factor_is_the_models_default(
    tmp_path: Path, model_type: str, expected: float
) -> None:
    assert read(tmp_path, model_type=model_type).rope.rotary_factor == expected


@pytest.mark.parametrize("rope_type", ["linear", "dynamic", "llama3", "longrope", "novel"])
@pytest.mark.parametrize(
    ("block", "type_key"),
    [("rope_scaling", "type"), ("rope_scaling", "rope_type"), ("rope_parameters", "rope_type")],
)
def test_other_rope_types_are_refused_by_name(
    tmp_path: Path, block: str, type_key: str, rope_type: str
) -> None:
    scaling = {type_key: rope_type, "factor": 4.0, "rope_theta": 1e6}
    with pytest.raises(UnsupportedModel, match=f"'{rope_type}' in {block}.*want 'default'"):
        read(tmp_path, **{block: scaling})


def test_scaling_hidden_behind_a_default_block_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="'yarn'"):
        read(tmp_path, rope_scaling={"type": "yarn", "factor": 4.0}, rope_parameters=V5_BLOCK)


def test_rope_that_differs_between_layer_types_is_refused(tmp_path: Path) -> None:
    blocks = {"full_attention": V5_BLOCK, "sliding_attention": V5_BLOCK}
    with pytest.raises(UnsupportedModel, match="full_attention, sliding_attention"):
        read(tmp_path, rope_parameters=blocks)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"rope_theta": None}, "rope_theta is missing"),
        ({"rope_theta": "1e6"}, "rope_theta is '1e6'"),
        ({"rope_theta": 0.0}, "rope_theta is 0.0"),
        ({"partial_rotary_factor": 0.0}, "partial_rotary_factor is 0.0"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5"),
        ({"rope_parameters": {"rope_theta": True}}, "rope_theta is True"),
    ],
)
def test_wrong_rope_values(tmp_path: Path, changes: dict[str, Any], key: str) -> None:
    config = read(tmp_path, **changes)
    with pytest.raises(ModelError, match=key):
        _ = config.rope


def test_rope_block_that_is_no_object(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="rope_scaling is 'yarn'"):
        read(tmp_path, rope_scaling="yarn")


KNOWN = ("linear_attention", "full_attention")
HYBRID = ("linear_attention", "linear_attention", "linear_attention", "full_attention")


def test_layer_types_from_list_interval_or_neither(tmp_path: Path) -> None:
    reversed_types = list(reversed(HYBRID))
    named = read(tmp_path, layer_types=reversed_types, full_attention_interval=4)
    assert named.layer_types(KNOWN) == tuple(reversed_types)
    assert read(tmp_path, full_attention_interval=4).layer_types(KNOWN) == HYBRID
    by_two = read(tmp_path, full_attention_interval=2, num_hidden_layers=5).layer_types(KNOWN)
    assert by_two == (KNOWN * 3)[:5]
    assert read(tmp_path, layer_types=None).layer_types(KNOWN) == ("full_attention",) * 4


@pytest.mark.parametrize("found", [["full_attention"] * 3, ["full_attention"] * 5, "x", [1] * 4])
def test_layer_types_that_do_not_fit(tmp_path: Path, found: Any) -> None:
    with pytest.raises(ModelError, match="a list of 4 strings"):
        read(tmp_path, layer_types=found).layer_types(KNOWN)


def test_layer_types_that_are_not_supported(tmp_path: Path) -> None:
    types = ["full_attention", "sliding_attention"] * 2
    with pytest.raises(UnsupportedModel, match="sliding_attention; want linear_attention"):
        read(tmp_path, layer_types=types).layer_types(KNOWN)
    with pytest.raises(UnsupportedModel, match="use_sliding_window"):
        read(tmp_path, use_sliding_window=True).layer_types(KNOWN)
    with pytest.raises(ModelError, match="full_attention_interval is 0"):
        read(tmp_path, full_attention_interval=0).layer_types(KNOWN)


@pytest.mark.parametrize("method", ["fp8", "awq", "gptq", "compressed-tensors", "novel", None])
@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_quantised_checkpoints_are_refused_by_method(
    tmp_path: Path, key: str, method: str | None
) -> None:
    with pytest.raises(UnsupportedModel, match=f"{key}.*{method!r}.*bfloat16"):
        read(tmp_path, **{key: {"quant_method": method, "bits": 4}})
    with pytest.raises(UnsupportedModel, match=repr(method)):
        read_hf_config(write(tmp_path, wrapped({key: {"quant_method": method}})))


def test_null_quantization_is_none(tmp_path: Path) -> None:
    assert read(tmp_path, quantization_config=None).model_type == "qwen3"


def test_quantization_in_a_file_of_its_own_is_refused(tmp_path: Path) -> None:
    separate = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8_PB_WO"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(separate))
    with pytest.raises(UnsupportedModel, match=r"hf_quant_config\.json.*'FP8_PB_WO'"):
        read(tmp_path)


def test_eos_is_the_union_of_all_three_sources(tmp_path: Path) -> None:
    config = wrapped({"eos_token_id": [3, 5]}, eos_token_id=4)
    found = read_hf_config(write(tmp_path, config, {"eos_token_id": [5, 6]}))
    assert found.eos_token_ids == (3, 5, 4, 6)


@pytest.mark.parametrize(
    ("config_eos", "generation", "expected"),
    [
        (None, None, ()),
        (3, None, (3,)),
        (3, {}, (3,)),
        (3, {"eos_token_id": None}, (3,)),
        (None, {"eos_token_id": 9}, (9,)),
        ([3, 3, None], {"eos_token_id": [9, 3]}, (3, 9)),
        (0, None, (0,)),
    ],
)
def test_eos_scalar_list_and_null(
    tmp_path: Path, config_eos: Any, generation: Any, expected: tuple[int, ...]
) -> None:
    directory = write(tmp_path, BASE | {"eos_token_id": config_eos}, generation)
    assert read_hf_config(directory).eos_token_ids == expected


@pytest.mark.parametrize("found", ["</s>", [1, "x"], -1, 1.5, True])
def test_wrong_eos_is_named_with_its_file(tmp_path: Path, found: Any) -> None:
    with pytest.raises(ModelError, match=r"/config\.json: eos_token_id"):
        read(tmp_path, eos_token_id=found)
    with pytest.raises(ModelError, match=r"/generation_config\.json: eos_token_id"):
        read_hf_config(write(tmp_path, BASE, {"eos_token_id": found}))


def test_generation_defaults(tmp_path: Path) -> None:
    assert read(tmp_path).generation == GenerationDefaults()
    given = {"do_sample": True, "temperature": 1, "top_k": 20, "top_p": 0.95, "min_p": 0.1}
    given |= {"repetition_penalty": 1.1, "unread": 3}
    found = read_hf_config(write(tmp_path, BASE, given))
    assert found.generation == GenerationDefaults(True, 1.0, 20, 0.95, 0.1, 1.1)
    partial = read_hf_config(write(tmp_path, BASE, {"do_sample": False, "top_p": None}))
    assert partial.generation == GenerationDefaults(do_sample=False)


@pytest.mark.parametrize(
    ("key", "value"), [("temperature", "hot"), ("top_k", 1.5), ("top_p", True), ("do_sample", 1)]
)
def test_wrong_generation_defaults(tmp_path: Path, key: str, value: Any) -> None:
    with pytest.raises(ModelError, match=rf"generation_config\.json: {key}"):
        read_hf_config(write(tmp_path, BASE, {key: value}))
