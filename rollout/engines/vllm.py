"""The vLLM engine, in this process. The only file that imports vLLM."""

from __future__ import annotations

import json
import os
import warnings
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from pydantic import ValidationError
from transformers import PreTrainedModel

from rollout.engines.interface import Sampled, SampleRequest, Weights, weight_mark
from rollout.engines.streams import EngineStream
from rollout.settings import EngineSettings, near_name

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams


class VLLMEngine:
    """One engine per rank, stepped by hand.

    `external_launcher` makes vLLM read torchrun's variables, so that each rank takes its own device.
    """

    name = "vllm"
    takes_stored = True

    def __init__(
        self,
        settings: EngineSettings,
        model_folder: Path,
        dtype: torch.dtype,
        device: torch.device,
        stop_ids: tuple[int, ...],
    ):
        num_threads, set_num_threads = torch.get_num_threads(), torch.set_num_threads
        self._on_gpu = device.type == "cuda"
        _prepare_import(self._on_gpu)
        from vllm import LLM

        self.device = device
        self.max_context_tokens = settings.max_context_tokens
        self.stop_ids = list(stop_ids)
        self._sleeps = settings.sleep and self._on_gpu
        self.stream = EngineStream(device)
        with self.stream.current():  # on which it captures its graphs, to replay them there
            self._llm = LLM(**_arguments(settings, model_folder, dtype, self._on_gpu), **settings.extra)
        self._engine = self._llm.llm_engine
        # vLLM lowers torch's threads while it starts, and its CPU worker takes the means to raise them away.
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(num_threads)
        self._num_threads = num_threads

    def enter_thread(self) -> None:
        torch.set_num_threads(self._num_threads)  # a thread's own, in OpenMP
        self.stream.enter()

    def add(self, key: int, request: SampleRequest) -> None:
        self._engine.add_request(str(key), {"prompt_token_ids": list(request.prompt_ids)}, self._params(request))

    def _params(self, request: SampleRequest) -> SamplingParams:
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        return SamplingParams(
            temperature=request.temperature,
            max_tokens=request.max_tokens,
            seed=request.seed,
            logprobs=0,  # of the sampled token alone
            stop_token_ids=self.stop_ids,
            ignore_eos=True,  # else it would stop where the generation config says so too
            flat_logprobs=True,  # numbers instead of an object a token
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,  # else every step copies every reply so far
        )

    def step(self) -> list[tuple[int, Sampled]]:
        return [(int(output.request_id), _sampled(output)) for output in self._engine.step()]

    def abort_all(self) -> None:
        running = list(self._engine.output_processor.request_states)
        if running:
            self._engine.abort_request(running, internal=True)  # by vLLM's own names for them

    def push_weights(self, weights: Weights) -> None:
        # After a deep sleep the order matters: weights first, then caches, then the KV cache's memory.
        asleep = self._sleeps and self._engine.is_sleeping()
        if asleep:
            torch.cuda.empty_cache()  # what the update freed, torch would keep from vLLM
            torch.cuda.reset_peak_memory_stats(self.device)  # nor does it lie beside what comes now
            self._llm.wake_up(tags=["weights"])
        with self.stream.handed_over():
            self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
            if not self._llm.reset_prefix_cache():
                raise RuntimeError(
                    "vLLM kept its prefix cache after a weight update: replies still run while weights change"
                )
            if asleep:
                self._llm.wake_up(tags=["kv_cache"])

    def fingerprint(self) -> list[tuple[tuple[str, ...], float | None]]:
        return self._llm.apply_model(_fingerprint)[0]

    def sleep(self) -> None:
        if self._sleeps:
            self._llm.sleep(level=2)  # the next push brings all weights anew

    def close(self) -> None:
        self._engine.engine_core.shutdown()


def _prepare_import(on_gpu: bool) -> None:
    """What vLLM reads from the environment when it is imported."""
    os.environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))
    # The engine core must live in this process to share its weights.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    if not on_gpu:
        # vLLM would compile its sampler at the first reply: seconds, and a C++ compiler, for nothing gained.
        # By the environment, since torch._dynamo.config holds for one thread only.
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
    warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")


NO_NEW_WEIGHTS = {"BloomForCausalLM"}
"""Its loader fails over the name of the tied head, which an engine may keep a copy of."""
TRANSFORMERS_CLASSES = "vllm.model_executor.models.transformers"
SETTING = {
    "model": "model.path",
    "tokenizer": "model.path",
    "dtype": "model.dtype",
    "max_model_len": "engine.max_context_tokens",
    "max_num_seqs": "engine.max_concurrent_replies",
    "gpu_memory_utilization": "engine.gpu_memory_utilization",
    "enforce_eager": "engine.eager",
    "enable_sleep_mode": "engine.sleep",
    "kv_cache_memory_bytes": "engine.cpu_kv_cache_gib",
}
"""What stands for an argument of vLLM's here."""

ONE_GPU = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")


def _arguments(settings: EngineSettings, model_folder: Path, dtype: torch.dtype, on_gpu: bool) -> dict[str, object]:
    """What vLLM's engine is built with, but for `settings.extra`."""
    return {
        "model": str(model_folder),
        "dtype": str(dtype).removeprefix("torch."),
        "seed": 0,  # every request brings its own
        "distributed_executor_backend": "external_launcher" if "RANK" in os.environ else None,
        "max_model_len": settings.max_context_tokens,
        "max_num_seqs": settings.max_concurrent_replies,
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",  # of the tempered distribution, as the trainer's are
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    } | (_gpu_arguments(settings) if on_gpu else _cpu_arguments(settings))


def check_extra(settings: EngineSettings, model_folder: Path, dtype: torch.dtype) -> None:
    """Raises ValueError where vLLM does not know an argument in `engine.extra` or refuses its value, and where a setting
    here decides it. Imports vLLM: seconds; nothing is loaded.
    """
    on_gpu = torch.cuda.is_available()
    _prepare_import(on_gpu)
    from vllm.engine.arg_utils import EngineArgs

    arguments = _arguments(settings, model_folder, dtype, on_gpu)
    known = [field.name for field in fields(EngineArgs)]
    for name in settings.extra:
        if name in ONE_GPU:
            raise ValueError(f"engine.extra.{name}: every rank has an engine of its own, on one GPU; remove it")
        if name in arguments or name == "tokenizer":
            remedy = f"set {SETTING[name]} instead" if name in SETTING else "it is fixed, remove it"
            raise ValueError(f"engine.extra.{name}: is not for extra; {remedy}")
        if name not in known:
            raise ValueError(f"engine.extra.{name}: vLLM's engine has no such argument{near_name(name, known)}")
    try:
        # Not of torchrun's ranks yet: nobody has joined them.
        EngineArgs(**arguments | {"distributed_executor_backend": None}, **settings.extra).create_engine_config()
    except ValidationError as error:
        fault = error.errors()[0]
        where = ".".join((error.title, *map(str, fault["loc"])))
        raise ValueError(f"engine.extra: vLLM refuses it: {where}: {fault['msg']}") from error
    except (ValueError, TypeError) as error:
        raise ValueError(f"engine.extra: vLLM refuses it: {error}") from error


def check_classes(model: PreTrainedModel, model_folder: Path) -> None:
    """Raises ValueError where vLLM would take other classes than the policy's, has none of its own for the model, or has
    some that take no new weights. Imports vLLM: seconds; nothing is loaded.

    Without classes of its own it would run transformers', and rewrite them for itself: in this process, so that the
    policy, which is of the same classes, could no longer be computed (vLLM 0.32, `_decorate_for_torch_compile`).
    """
    name, named = type(model).__name__, model.config.architectures
    if named != [name]:
        raise ValueError(
            f"engine.kind: vLLM goes by architectures of {model_folder / 'config.json'}, which is {json.dumps(named)}, and "
            f'the policy is a {name}; write "architectures": ["{name}"] there, or set engine.kind=transformers'
        )
    if name in NO_NEW_WEIGHTS:
        raise ValueError(
            f"engine.kind: vLLM's {name}, which {model_folder} is, refuses new weights; set engine.kind=transformers"
        )
    _prepare_import(torch.cuda.is_available())
    from vllm.model_executor.models.registry import ModelRegistry

    registered = ModelRegistry.models.get(name)
    if registered is None or getattr(registered, "module_name", None) == TRANSFORMERS_CLASSES:
        raise ValueError(
            f"engine.kind: vLLM has no classes of its own for {name}, which {model_folder} is, and would change those "
            "that training computes with; set engine.kind=transformers, or give vLLM a process of its own with "
            "engine.kind=remote"
        )


def _gpu_arguments(settings: EngineSettings) -> dict[str, object]:
    return {
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        "enforce_eager": settings.eager,
        "enable_sleep_mode": settings.sleep,
    }


def _cpu_arguments(settings: EngineSettings) -> dict[str, object]:
    # A prompt cut into chunks makes vLLM rewind the request's generator, which a CPU generator cannot do.
    whole_prompts = {"enable_chunked_prefill": False, "max_num_batched_tokens": max(settings.max_context_tokens, 4096)}
    return whole_prompts | {
        "enforce_eager": True,
        "kv_cache_memory_bytes": settings.cpu_kv_cache_gib * 2**30,
        "block_size": 32,  # whole blocks are found again, and prompts are shorter than the 128 tokens vLLM takes here
    }


@torch.inference_mode()
def _fingerprint(model: torch.nn.Module) -> list[tuple[tuple[str, ...], float | None]]:
    """Marks of all matrices and vectors, and of experts.

    The CPU backend computes with a packed copy of each matrix, which a tied head keeps when its visible
    weight changes: there the kernel itself is asked too.
    """
    fused = getattr(model, "packed_modules_mapping", {})
    marks = _experts_marks(model)
    for module_name, module in model.named_modules():
        parent, _, leaf = module_name.rpartition(".")
        for name, parameter in module.named_parameters(recurse=False):
            names = tuple(".".join(filter(None, (parent, part, name))) for part in fused.get(leaf, [leaf]))
            if parameter.ndim in (1, 2) and parameter.numel():
                marks.append((names, weight_mark(parameter)))
            if name == "weight" and hasattr(module, "cpu_linear"):
                size = getattr(module, "input_size_per_partition", None) or module.embedding_dim
                unit = torch.zeros(1, size, dtype=parameter.dtype)
                unit[0, 0] = 1
                marks.append((names, weight_mark(module.quant_method.apply(module, unit, bias=None)[0])))
    return marks


def _experts_marks(model: torch.nn.Module) -> list[tuple[tuple[str, ...], float | None]]:
    """Marks of experts, which vLLM stacks: as (expert, row, column) for its Triton kernels, in layouts of their own
    for others. On a CPU they are packed as the model loads, but not when weights are pushed: no number is right there.
    """
    marks: list[tuple[tuple[str, ...], float | None]] = []
    for module_name, module in model.named_modules():
        if not hasattr(module, "get_expert_mapping") or not hasattr(module, "w13_weight"):
            continue
        prefix = module_name.removesuffix("experts.routed_experts")
        backend = getattr(module.quant_method, "unquantized_backend", None)
        parts: dict[tuple[str, int], list[str]] = {}
        for stacked, stored, expert, _ in module.get_expert_mapping():
            parts.setdefault((stacked.rpartition(".")[2] + "weight", expert), []).append(f"{prefix}{stored}weight")
        for (name, expert), names in parts.items():
            mark = None
            if module.w13_weight.device.type == "cpu":
                mark = float("nan")
            elif backend is not None and backend.name.endswith("TRITON"):
                mark = weight_mark(getattr(module, name)[expert])
            marks.append((tuple(names), mark))
    return marks


def _sampled(output: RequestOutput) -> Sampled:
    (reply,) = output.outputs
    assert reply.logprobs.token_ids == list(reply.token_ids)  # of the sampled tokens, and of no others
    return Sampled(
        tuple(reply.token_ids), tuple(reply.logprobs.logprobs), reply.finish_reason, output.num_cached_tokens
    )


class WorkerExtension:
    """What a server's worker answers to `rollout.engines.remote` (vLLM mixes it into its worker class)."""

    def weight_marks(self) -> list[tuple[tuple[str, ...], float | None]]:
        return _fingerprint(self.model_runner.get_model())

    def served(self, path: str) -> dict[str, object]:
        """The model's configuration, and whether this machine has `path`."""
        config = {**self.model_config.hf_config.to_dict(), "dtype": str(self.model_config.dtype).removeprefix("torch.")}
        plain = {name: value for name, value in config.items() if isinstance(value, str | int)}
        return {"config": plain, "sees_path": Path(path).exists()}
