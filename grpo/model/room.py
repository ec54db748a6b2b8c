"""Whether the GPU of this rank has room for what a run keeps on it from its start.

A lower bound: gradients and activations come on top, and may take what the engine leaves while it sleeps. So what is
refused here would fail, after minutes of loading, with an error that does not tell who else uses the GPU.
"""

from __future__ import annotations

import os
from dataclasses import replace

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from grpo.config import Config
from rollout.engines.choice import choose_engine
from rollout.gpus import GPU, check_room, driver_gpus

REMEDY = (
    "give training other GPUs (CUDA_VISIBLE_DEVICES) than the role servers (USER_GPUS and JUDGE_GPUS of "
    "launch/serve_roles.sh), stop what runs there, or lower engine.gpu_memory_utilization"
)


def check_own_gpu(config: Config, *, trains: bool) -> None:
    """Raises GPUFault where the GPU has too little free, naming who uses it. Nothing is known without `nvidia-smi`.

    `trains`: the model and its optimizer lie there too.
    """
    gpu = _own_gpu()
    if gpu is None:
        return
    num_parameters = _num_parameters(config)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    needs = _engine_need(config, gpu, num_parameters)
    if trains:
        needs["model and optimizer"] = state_bytes(config, num_parameters, world_size) / 2**30
    check_room(gpu, needs, REMEDY)


def state_bytes(config: Config, num_parameters: int, world_size: int) -> float:
    """Least memory of weights, float32 masters, AdamW's two averages and the reference, on one rank."""
    stage, is_bf16 = config.deepspeed.stage, config.model.dtype == "bfloat16"
    width = 2 if is_bf16 else 4
    weights = width * num_parameters / (world_size if stage == 3 else 1)
    # DeepSpeed's bfloat16 optimizer shards at stage 0 too.
    optimizer = (12 if is_bf16 else 8) * num_parameters / (world_size if stage > 0 or is_bf16 else 1)
    offloads = config.deepspeed.offloads
    return (
        weights * ("offload_param" not in offloads)
        + optimizer * ("offload_optimizer" not in offloads)
        + weights * (config.loss.kl_coef > 0)
    )


def _engine_need(config: Config, gpu: GPU, num_parameters: int) -> dict[str, float]:
    kind, _ = choose_engine(config.engine)
    if kind == "vllm":
        share = config.engine.gpu_memory_utilization
        return {f"engine.gpu_memory_utilization {share:g}": share * gpu.total}
    if kind == "transformers":
        return {"engine": num_parameters * (2 if config.model.dtype == "bfloat16" else 4) / 2**30}
    return {}


def _own_gpu() -> GPU | None:
    gpus = driver_gpus() if torch.cuda.is_available() else []
    if not gpus:
        return None
    # By its UUID, since CUDA may count in another order than the driver, and skips hidden ones.
    device = torch.cuda.get_device_properties(int(os.environ.get("LOCAL_RANK", "0")))
    gpu = next((gpu for gpu in gpus if gpu.uuid.removeprefix("GPU-") == str(device.uuid)), None)
    return gpu and replace(gpu, total=device.total_memory / 2**30)  # without what the driver keeps, as vLLM counts


def _num_parameters(config: Config) -> int:
    with torch.device("meta"):  # shapes alone
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config.model.path))
    return sum(parameter.numel() for parameter in model.parameters())
