"""The native engine: `glm5_next` text checkpoints from config.json and safetensors, on CPU."""

from autotune.runtimes.native.runtime import NativeRuntime

__all__ = ["NativeRuntime"]
