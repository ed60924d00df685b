"""Writes ``ebbench/devices/config_defaults.toml``: what a config.json that leaves a key out means, by the configuration
classes of transformers and vLLM: ``python -m tests.vllm.class_defaults``.
"""

from __future__ import annotations

import inspect
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ebbench.devices import model_config
from ebbench.devices.families import FAMILIES
from ebbench.devices.geometry import ModelGeometry
from ebbench.devices.mixer_rules import HARMLESS, SHAPES
from ebbench.errors import InputFileError
from tests.vllm.test_model_shapes import SET

OF_VLLM = ("chatglm", "hyperclovax", "muse_glimmer_text")
"""Types of which vLLM has a class of its own, and transformers none."""
UNLIKE = ("step3p5", "step3p7")
"""Types whose class in vLLM is not as in transformers, and of which published files say everything."""
SAME = {"kimi_k2": "deepseek_v3", "mistral4_text": "mistral4", "mimo_v2": "mimo_v2_flash", "qwen2_vl": "qwen2_vl_text",
        "qwen2_5_vl": "qwen2_5_vl_text", "gemma3": "gemma3_text", "gemma4": "gemma4_text", "qwen3_5": "qwen3_5_text",
        "qwen3_5_moe": "qwen3_5_moe_text", "glm4v": "glm4v_text", "glm5_next": "glm5_next_text"}  # fmt: skip
"""Types that are read by another's class."""
ELSEWHERE = {"kimi_linear": ("linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim"),
             "glm5_next_text": ("linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim"),
             "nemotron_h": ("num_hidden_layers",)}  # fmt: skip
"""Keys that published files have within an object, or say by a list."""
HEAD = """\
# What a key means that a config.json leaves out, by model_type: the defaults of the classes of transformers 5.19 and
# vLLM 0.32, where leaving it out would be read as something else or refused. Written by tests/vllm/class_defaults.py.
"""


def class_of(kind: str) -> Any:
    """The configuration class that vLLM reads a type with."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from vllm.transformers_utils.config import _CONFIG_REGISTRY

    kind = SAME.get(kind, kind)
    if kind in UNLIKE:
        return None
    if kind in OF_VLLM:
        return _CONFIG_REGISTRY[kind]
    try:
        return CONFIG_MAPPING[kind]  # whose get() finds no class that was not loaded yet
    except KeyError:
        return None


def full(cls: Any, **given: Any) -> dict[str, Any]:
    """The config.json that the class writes when it writes everything."""
    text = cls(**given).to_json_string(use_diff=False)
    return dict(json.loads(text.replace('{"__float__": "Infinity"}', "1e9")))


def read(config: Mapping[str, Any]) -> ModelGeometry | str:
    """The geometry, or the message of the refusal."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model" / "config.json"
        path.parent.mkdir()
        path.write_text(json.dumps(config))
        try:
            return model_config.read_config(path)
        except InputFileError as error:
            return str(error).removeprefix(f"{path}: ")


def default(cls: Any, key: str) -> Any:
    """What the class takes for a key, by whatever name it has it."""
    given = inspect.signature(cls).parameters
    names = (key, *(name for name, written in cls.attribute_map.items() if written == key))
    return next((given[name].default if name in given else getattr(cls, name) for name in names
                 if name in given or isinstance(getattr(cls, name, None), int | str)), None)  # fmt: skip


def defaults(kind: str, cls: Any) -> dict[str, Any]:
    """The class's own plain values that speak of the shape, or without which its config.json is read otherwise."""
    config = {**full(cls, **SET.get(kind, {})), "model_type": kind}
    whole = read(config)
    own = {key: default(cls, key) for key in config if key not in ELSEWHERE.get(kind, ())}

    def matters(key: str) -> bool:
        of_shape = bool(own[key]) and SHAPES.search(key) and not HARMLESS.fullmatch(key)
        return bool(of_shape) or read({name: value for name, value in config.items() if name != key}) != whole

    plain = (key for key in config if key != "model_type" and isinstance(own.get(key), int | str))
    return {key: own[key] for key in plain if own[key] == config[key] and matters(key)}


def main() -> None:
    """Write the file."""
    model_config.class_defaults = dict  # type: ignore[assignment]  # as without the file
    lines = [HEAD]
    for kind in sorted(FAMILIES):
        cls = class_of(kind)
        try:
            found = defaults(kind, cls) if cls is not None else {}
        except (ValueError, TypeError) as error:
            print(f"{kind}: {error}")
            continue
        if found:
            values = ", ".join(f"{key} = {json.dumps(value)}" for key, value in sorted(found.items()))
            lines.append(f"{kind} = {{ {values} }}\n")
    Path(model_config.__file__).with_name("config_defaults.toml").write_text("".join(lines))


if __name__ == "__main__":
    main()
