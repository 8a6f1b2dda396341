"""``python -m zero_core.models.gguf SOURCE.gguf TARGET_DIR``: a GGUF file as a model directory in fp32.

Quantized weights become floats; a fine-tuning starts from those. Needs the packages of the ``demo``
extra: gguf.
"""

import argparse
import shutil
import struct
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from zero_core.checkpoints import durable
from zero_core.models.model_files import InvalidModel, check_model_dir


def convert(source: Path, target: Path) -> bool:
    """False where ``target`` is there already. Written aside and renamed: it is whole or absent."""
    if target.exists():
        check_model_dir(target)
        return False
    if not source.is_file():
        raise InvalidModel(f"{source} is not a file")
    model, tokenizer = _load(source)
    aside = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    model.save_pretrained(aside)
    tokenizer.save_pretrained(aside)
    check_model_dir(aside)
    durable.sync_tree(aside)
    aside.rename(target)
    durable.sync(target.parent)
    return True


def _load(source: Path) -> tuple[Any, Any]:
    where = {"gguf_file": source.name, "local_files_only": True, "trust_remote_code": False}
    try:
        tokenizer = AutoTokenizer.from_pretrained(source.parent, **where)
        model: Any = AutoModelForCausalLM.from_pretrained(source.parent, dtype=torch.float32, **where)
    except (ValueError, LookupError, OSError, ImportError, struct.error) as error:
        raise InvalidModel(f"{source} can't be read as GGUF: {error}") from error
    # The weights are floats now; with the mark of quantization on it, a model is not saved.
    vars(model.config).pop("quantization_config", None)
    model.is_quantized = False
    model.hf_quantizer = None
    model.quantization_method = None
    return model, tokenizer


def main() -> int:
    parser = argparse.ArgumentParser(description="Convert a GGUF file to a Hugging Face directory, once.")
    parser.add_argument("source", type=Path, help="the .gguf file")
    parser.add_argument("target", type=Path, help="the directory to make")
    options = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        written = convert(options.source.resolve(), options.target.absolute())
    except InvalidModel as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{options.target}: {'written' if written else 'already there'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
