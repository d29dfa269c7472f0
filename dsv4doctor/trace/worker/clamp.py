"""Whether anything reads the SwiGLU clamp of a layer: what nobody reads reaches no kernel.

SGLang hands the model's swiglu_limit to its experts in the runner's configuration, where each
path picks it up, or does not.
"""

from .serving import optional

_FIELD = "swiglu_limit"
_READ = "_dsv4doctor_swiglu_limit_read"


def watch():
    """From now on each runner configuration remembers that its swiglu_limit was read."""
    config = optional("sglang.srt.layers.moe.moe_runner.base", "MoeRunnerConfig")
    if config is None or _FIELD not in getattr(config, "__dataclass_fields__", {}):
        return
    if isinstance(config.__dict__.get(_FIELD), property):
        return

    def read(self):
        self.__dict__[_READ] = True
        return self.__dict__[_FIELD]

    def write(self, value):
        self.__dict__[_FIELD] = value

    setattr(config, _FIELD, property(read, write))


def was_read(layer):
    """None: the layer has no configuration that was watched, or no clamp."""
    config = getattr(layer, "moe_runner_config", None)
    if config is None or getattr(config, "__dict__", {}).get(_FIELD) is None:
        return None
    if not isinstance(type(config).__dict__.get(_FIELD), property):
        return None
    return _READ in config.__dict__
