"""What NVIDIA's driver says about this machine's GPUs, and whether a process can have those it was given.

Asked of `nvidia-smi`, which needs no torch, makes no CUDA context and takes no memory. All memory in GiB.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MIN_DRIVER = {11: "450.80.02", 12: "525.60.13", 13: "580.65.06"}
"""Oldest driver by major version of CUDA, on Linux (CUDA's release notes, "minor version compatibility")."""


class GPUFault(ValueError):
    """A GPU that only the rank it was given to knows about, so that this rank must tell."""


@dataclass(frozen=True, slots=True)
class GPU:
    index: int
    """As `nvidia-smi` counts, in the order of the PCI bus."""
    uuid: str
    name: str
    driver: str
    total: float
    free: float

    def __str__(self) -> str:
        return f"GPU {self.index} ({self.name})"


def driver_gpus() -> list[GPU]:
    """All GPUs of this machine, however few this process may see. Empty where there is no working `nvidia-smi`."""
    rows = _query("--query-gpu=index,uuid,name,driver_version,memory.total,memory.free")
    return [
        GPU(int(index), uuid, name, driver, _gib(total), _gib(free)) for index, uuid, name, driver, total, free in rows
    ]


def users_of(gpu: GPU) -> list[str]:
    """The processes that compute on `gpu`, in words; those of other containers cannot be seen."""
    told = []
    for uuid, pid, *name, used in _query("--query-compute-apps=gpu_uuid,pid,process_name,used_memory"):
        if uuid == gpu.uuid:
            memory = f", {_gib(used):.1f} GiB" if used.isdigit() else ""
            told.append(f"pid {pid} ({', '.join(name)}{memory})")
    return told


def check_seen() -> None:
    """Makes sure that torch computes on the GPUs of this machine, unless they were hidden from it on purpose.

    Raises ValueError naming the driver that is needed, or whatever else keeps torch from them, with the remedy; and
    where torchrun started more ranks on this machine than torch sees GPUs.
    """
    import torch  # here, since the role servers' check of their GPUs does without

    if torch.cuda.is_available():
        seen, num_ranks = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if num_ranks > max(seen, 1):
            raise ValueError(
                f"{num_ranks} ranks were started on this machine, and torch sees {seen} of its GPUs: start as many "
                "ranks as GPUs (torchrun's --nproc_per_node, NUM_GPUS of launch/train_8gpu.sh), or name more of them "
                "in CUDA_VISIBLE_DEVICES"
            )
        return
    if _are_hidden():
        return
    gpus = driver_gpus()
    if gpus:
        raise ValueError(
            f"this machine has {len(gpus)} GPU{'s' * (len(gpus) > 1)}, {gpus[0].name}, and torch sees none: "
            f"{_why_unseen(gpus, torch)}; or set CUDA_VISIBLE_DEVICES= (to nothing) to compute on the CPU"
        )
    if "version mismatch" in _run("-L")[1]:
        raise ValueError(
            "nvidia-smi says that NVIDIA's driver was updated while it was loaded (driver/library version mismatch): "
            "nothing sees the GPUs. Restart the machine; or set CUDA_VISIBLE_DEVICES= (to nothing) to compute on the "
            "CPU"
        )


def _are_hidden() -> bool:
    """Whether CUDA_VISIBLE_DEVICES names no device: nothing, or -1, as people write to hide all."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return chosen is not None and re.match(r"\s*(\d|GPU-|MIG-)", chosen) is None


def _why_unseen(gpus: Sequence[GPU], torch) -> str:
    built, installed = torch.version.cuda, gpus[0].driver
    if built is None:
        return (
            f"torch {torch.__version__} is built without CUDA. Install the build of the same version for CUDA (plain "
            "torch on PyPI, which pip install -e '.[gpu]' brings, or bash launch/setup.sh)"
        )
    needed = MIN_DRIVER.get(int(built.split(".")[0]))
    if needed and _version(installed) < _version(needed):
        return (
            f"torch {torch.__version__} is built for CUDA {built}, which needs NVIDIA driver {needed} or newer, and "
            f"{installed} is installed. Update the driver, or install a torch that is built for an older CUDA"
        )
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None and not _chosen(chosen, gpus):
        return f"CUDA_VISIBLE_DEVICES={chosen} names none of them (0 to {len(gpus) - 1})"
    try:
        torch.cuda.init()
        reason = "it gives no reason"
    except (RuntimeError, AssertionError) as error:  # AssertionError: not compiled for it
        reason = f"{error}".strip().split("\n")[0]
    return f'driver {installed} is new enough for CUDA {built}, and torch says "{reason}"'


def check_free(variable: str, chosen: str, share: float) -> None:
    """Makes sure that each GPU in `chosen` (as in CUDA_VISIBLE_DEVICES) has `share` of its memory free.

    Raises ValueError naming `variable`, the GPU and who uses it. Without `nvidia-smi` nothing is known, nor refused.
    """
    gpus = driver_gpus()
    if not gpus:
        return
    found = _chosen(chosen, gpus)
    if len(found) < len(chosen.split(",")) and "MIG-" not in chosen:
        raise ValueError(f"{variable}={chosen} names a GPU that this machine does not have (0 to {len(gpus) - 1})")
    for gpu in found:
        check_room(
            gpu,
            {f"{share:g} of it": share * gpu.total},
            f"choose a GPU that nobody uses ({variable}), or stop what runs there",
        )


def check_room(gpu: GPU, needs: Mapping[str, float], remedy: str) -> None:
    """Raises GPUFault where less is free on `gpu` than the sum of `needs` (what for → GiB)."""
    needed = sum(needs.values())
    if gpu.free >= needed:
        return
    parts = ", ".join(f"{what}: {size:.1f}" for what, size in needs.items())
    users = users_of(gpu)
    used = f"in use by {', '.join(users)}" if users else f"{gpu.total - gpu.free:.1f} GiB are in use"
    raise GPUFault(
        f"{gpu}: {gpu.free:.1f} of {gpu.total:.1f} GiB are free, and {needed:.1f} are needed from the start ({parts}); "
        f"{used}; {remedy}"
    )


def _chosen(chosen: str, gpus: Sequence[GPU]) -> list[GPU]:
    """Those that CUDA_VISIBLE_DEVICES would show: indices, or beginnings of UUIDs."""
    wanted = [one.strip() for one in chosen.split(",")]
    return [gpu for one in wanted for gpu in gpus if one == str(gpu.index) or (one and gpu.uuid.startswith(one))]


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".") if part.isdigit())


def _gib(mib: str) -> float:
    return float(mib) / 1024 if mib.isdigit() else float("inf")  # some share the machine's memory, and tell no figure


def _query(what: str) -> list[list[str]]:
    """Rows of `nvidia-smi`, cell by cell; none where it fails."""
    works, answer = _run(what, "--format=csv,noheader,nounits")
    return [[cell.strip() for cell in line.split(",")] for line in answer.splitlines() if line.strip()] if works else []


def _run(*options: str) -> tuple[bool, str]:
    """Whether `nvidia-smi` works, and what it says."""
    try:
        done = subprocess.run(["nvidia-smi", *options], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return False, ""
    return done.returncode == 0, done.stdout or done.stderr
