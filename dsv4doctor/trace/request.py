"""What is to be traced."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dsv4doctor.models import Arch, Checkpoint, Gpu, Launch, SglangTree

# Kernels are recorded and never run; Triton's interpreter would run them on tensors without data.
_ONLY_FOR_KERNELS = {"TRITON_INTERPRET"}
_RELEVANT = (
    "SGLANG_",
    "SGL_",
    "FLASHINFER_",
    "NCCL_",
    "CUDA_",
    "TORCH_",
    "PYTORCH_",
    "TRITON_",
    "TVM_",
    "DG_",
    "DEEP_GEMM_",
    "DEEPEP_",
    "NVSHMEM_",
    "HF_",
    "HUGGINGFACE_",
    "TRANSFORMERS_",
)


@dataclass(frozen=True)
class TraceRequest:
    """One launch to trace."""

    tree: SglangTree
    interpreter: Path
    """The Python whose torch and transformers are used."""
    arch: Arch
    checkpoint: Checkpoint
    model_path: Path
    """The folder that SGLang reads config and headers from."""
    launch: Launch
    with_path: bool = False
    """Also record the decision path."""
    with_paths: bool = False
    """Also run the hot paths beside the routed experts; costs a second or two."""
    environment: Mapping[str, str] | None = None
    """The machine's variables under the launch's own; None: this process's."""
    gpu: Gpu | None = None
    gpu_count: int | None = None
    elsewhere: bool = False
    """The launch is for another machine: what SGLang asks of this one is stood in for."""
    whole: bool = False
    """Import what SGLang imports, all of it: slow, to check that the lean trace says the same."""
    modules: tuple[str, ...] = ()
    """Modules of SGLang that have to import (or compile, where a trace leaves them out)."""

    def variables(self) -> dict[str, str]:
        """The variables that SGLang will see, the launch's own last."""
        seen = self.launch.environment if self.launch.in_container else self.all_variables()
        return {
            name: value
            for name, value in seen.items()
            if name.startswith(_RELEVANT) and name not in _ONLY_FOR_KERNELS
        }

    def all_variables(self) -> dict[str, str]:
        """The same with the machine's other ones."""
        base = os.environ if self.environment is None else self.environment
        return {**base, **self.launch.environment}

    def python_path(self) -> list[str]:
        """Folders that the server finds modules in, beyond its interpreter's own."""
        named = "" if self.tree.borrowed else self.all_variables().get("PYTHONPATH", "")
        return [folder for folder in named.split(os.pathsep) if folder]

    def user_base(self) -> str | None:
        """The folder of the user's own packages, where the server looks into it."""
        variables = self.all_variables()
        if self.tree.borrowed or variables.get("PYTHONNOUSERSITE"):
            return None
        home = variables.get("HOME")
        return variables.get("PYTHONUSERBASE") or (os.path.join(home, ".local") if home else None)

    def arguments(self) -> list[str]:
        path = str(self.model_path)
        model = self.launch.model or path
        # A model is named by its path, and SGLang refuses a colon in a name: the server's counts.
        named = ["--served-model-name", model] if (":" in model) != (":" in path) else []
        return ["--model-path", path, *named, *self.launch.flags]
