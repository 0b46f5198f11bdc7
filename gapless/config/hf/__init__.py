"""The only reader of a checkpoint's config.json and generation_config.json.

Callers get checked values: every accessor raises `ModelError` with the file, the key, the value
found and the value wanted, so that no typo or missing key turns into a default.
"""

from gapless.config.hf.config import HfConfig
from gapless.config.hf.generation import GenerationDefaults
from gapless.config.hf.read import read_hf_config
from gapless.config.hf.rope import RopeParameters

__all__ = ["GenerationDefaults", "HfConfig", "RopeParameters", "read_hf_config"]
