"""Loads a decoder-only model from local files.

Rules
-----
* Nothing is downloaded (``cli.engine`` also sets transformers offline, before it is imported).
* Models that the engine does not compute correctly are refused before anything is allocated; see
  ``support``.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch

from kvtier.core.identity import KeySpace
from kvtier.core.layout import KVLayout
from kvtier.core.plan import ModelFlops
from kvtier.engine.attention import ATTENTION_NAME, register_attention
from kvtier.engine.chat_template import ChatTemplate, end_tokens
from kvtier.engine.fingerprint import canonical_config, weights_fingerprint
from kvtier.engine.support import ARCHITECTURES, check_fields, check_model, refuse
from kvtier.errors import StartError

__all__ = ["LoadedModel", "key_space", "load_model", "model_flops"]

_DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

_REASON_CHARACTERS_MAX = 300
"""Limit for transformers' message about a broken file, which can be a page long."""


@dataclass(frozen=True)
class LoadedModel:
    """A model and its tokenizer; ``encode`` and ``decode`` may be called from any thread."""

    model: Any
    """transformers' own module, in evaluation mode, with paged attention."""
    tokenizer: Any
    config: Any
    model_id: str
    context_limit: int
    """The most tokens of a sequence, prompt and answer together."""
    eos_ids: frozenset[int]
    """The tokens that end an answer."""
    parse_special_in_messages: bool = False
    """Whether special tokens spelled out in chat messages are parsed."""
    _tokenizer_lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def vocab_size(self) -> int:
        """Return the number of token ids with an embedding."""
        return int(self.config.vocab_size)

    @cached_property
    def token_characters_max(self) -> int:
        """Return the length of the longest token; in the vocabulary a byte is a character."""
        return max(map(len, self.tokenizer.get_vocab()))

    @cached_property
    def special_tokens(self) -> Mapping[str, int]:
        """Return the ids of the tokens that ``decode`` leaves out, by name in the vocabulary."""
        added = self.tokenizer.added_tokens_decoder.items()
        return {token.content: token_id for token_id, token in added if token.special}

    @property
    def num_layers(self) -> int:
        """Return the number of attention layers."""
        return int(self.config.num_hidden_layers)

    @property
    def num_kv_heads(self) -> int:
        """Return the number of KV heads in each layer."""
        return int(self.config.num_key_value_heads)

    @property
    def head_dim(self) -> int:
        """Return the dimension of one head's K or V."""
        head_dim = getattr(self.config, "head_dim", None)
        return int(head_dim or self.config.hidden_size // self.config.num_attention_heads)

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the weights, of K and of V."""
        dtype = self.model.dtype
        assert isinstance(dtype, torch.dtype)
        return dtype

    @property
    def dtype_name(self) -> str:
        """Return the dtype as the configuration names it."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def device_type(self) -> str:
        """Return ``cpu`` or ``cuda``."""
        return str(self.model.device.type)

    @cached_property
    def weights(self) -> bytes:
        """Return the content fingerprint of the weights as loaded."""
        return weights_fingerprint(self.model)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, with the special tokens the model begins with."""
        with self._tokenizer_lock:  # tokenizers store settings of a call in themselves
            return list(self.tokenizer.encode(text))

    def decode(self, token_ids: Iterable[int]) -> str:
        """Return the text of token ids, without special tokens."""
        # Without the lock: decoding stores nothing, and must not wait for the encoding of a long
        # text.
        text = self.tokenizer.decode(
            list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """Return the tokenizer's chat template. Raises ValueError if it has none."""
        return ChatTemplate(self.tokenizer, parses_special=self.parse_special_in_messages)

    def apply_chat_template(self, messages: list[dict[str, str]]) -> list[int]:
        """Return the prompt for the next message of a conversation.

        Raises ValueError if the model has no template or its template refuses the messages, and
        MessageRefused, a ValueError, for a message that the model would not see as it was sent.
        """
        with self._tokenizer_lock:
            return self.chat_template.encode(messages)


def key_space(loaded: LoadedModel, layout: KVLayout) -> KeySpace:
    """Return the key space of the blocks that ``loaded`` computes in this ``layout``."""
    return KeySpace(
        weights=loaded.weights,
        model_config=canonical_config(loaded.config.to_dict()),
        layout=layout,
        compute_dtype=loaded.dtype_name,
        # The same input gives slightly different bytes on another kind of device.
        engine=f"integrated/1/{loaded.device_type}",
    )


def load_model(
    path: str | Path, *, device: str = "cpu", dtype: str = "auto", context_limit: int = 0
) -> LoadedModel:
    """Load a folder with config.json, safetensors and a tokenizer, or a GGUF file.

    ``dtype`` auto is float32 on cpu and bfloat16 elsewhere; ``context_limit`` 0 is the model's own.
    Raises StartError, before anything is allocated, for a model that is not supported.
    """
    path = Path(path).expanduser().absolute()
    check_model(path, context_limit)
    torch_dtype = _choose_dtype(device, dtype)
    register_attention()
    with _read_gguf_once() if path.is_file() else nullcontext():
        config, limit = _read_config(path, context_limit)
        tokenizer = _load_tokenizer(path)
        model = _load_weights(path, config, torch_dtype)
        eos_ids = end_tokens(path, model, tokenizer)
    model = model.to(device).requires_grad_(requires_grad=False)
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        config=model.config,
        model_id=path.name.removesuffix(".gguf"),
        context_limit=limit,
        eos_ids=eos_ids,
    )


@contextmanager
def _read_gguf_once() -> Iterator[None]:
    """Cache the parsing of a GGUF header for configuration, tokenizer and weights.

    The parser is slow, and the table of tensor names is rebuilt for each of a model's modules: for
    the demo model that was half of the start time. Both only depend on their arguments.
    """
    import gguf

    slow = {name: getattr(gguf, name) for name in ("GGUFReader", "get_tensor_name_map")}
    for name, function in slow.items():
        setattr(gguf, name, cache(function))
    try:
        yield
    finally:
        for name, function in slow.items():
            setattr(gguf, name, function)


@contextmanager
def _reading(part: str) -> Iterator[None]:
    """Turn any error about a part of a model's files into a one-line refusal."""
    try:
        yield
    except Exception as error:  # third-party parsers raise anything: struct.error, TypeError
        reason = " ".join(str(error).split())[:_REASON_CHARACTERS_MAX]
        raise refuse(f"cannot read the {part}: {reason}", "download the files again") from error


def _choose_dtype(device: str, dtype: str) -> torch.dtype:
    device_type = device.partition(":")[0]
    if device_type not in {"cpu", "cuda"}:
        raise StartError("engine.device", f"{device!r} is unknown", "use cpu, cuda or cuda:N")
    if device_type == "cuda" and not torch.cuda.is_available():
        raise StartError("engine.device", "PyTorch found no CUDA device", "use cpu")
    if dtype == "auto":
        return torch.float32 if device_type == "cpu" else torch.bfloat16
    if dtype not in _DTYPES:
        raise StartError("engine.dtype", f"{dtype!r} is unknown", f"use auto, {', '.join(_DTYPES)}")
    return _DTYPES[dtype]


def _source(path: Path) -> tuple[str, dict[str, str]]:
    """Return the arguments of transformers' loaders for a folder or a file."""
    if path.is_file():
        return str(path.parent), {"gguf_file": path.name}
    return str(path), {}


def _read_config(path: Path, context_limit: int) -> tuple[Any, int]:
    """Return the checked configuration, with its defaults, and the context limit."""
    from transformers import AutoConfig

    folder, options = _source(path)
    with _reading("configuration"):
        config = AutoConfig.from_pretrained(folder, local_files_only=True, **options)
    limit = check_fields(config.to_dict(), context_limit)
    if getattr(config, "sliding_window", None) is not None:
        config.sliding_window = None  # never reached: full attention gives the same result
    return config, limit


def _load_tokenizer(path: Path) -> Any:
    from transformers import AutoTokenizer

    folder, options = _source(path)
    with _reading("tokenizer"):
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, **options)


def _load_weights(path: Path, config: Any, dtype: torch.dtype) -> Any:
    """Load the weights into transformers' model; refuses missing or mismatched tensors."""
    import transformers

    model_class = getattr(transformers, ARCHITECTURES[config.model_type])
    options = {
        "config": config,
        "dtype": dtype,
        "attn_implementation": ATTENTION_NAME,
        "output_loading_info": True,
    }
    with _reading("weights"):
        if path.is_file():
            tensors = _read_gguf(path, config, dtype, model_class)
            model, outcome = model_class.from_pretrained(None, state_dict=tensors, **options)
        else:
            model, outcome = model_class.from_pretrained(
                str(path), local_files_only=True, use_safetensors=True, **options
            )
    wrong = sorted([*outcome["missing_keys"], *outcome["mismatched_keys"]], key=str)
    if wrong:  # transformers would fill them with random numbers
        raise refuse(
            f"{len(wrong)} tensors are missing or mismatched, such as {wrong[0]}",
            "download the weights again",
        )
    return model.eval()


def _read_gguf(
    path: Path, config: Any, dtype: torch.dtype, model_class: Any
) -> dict[str, torch.Tensor]:
    """Return a GGUF file's tensors, dequantized, in transformers' names and RoPE order."""
    from transformers import modeling_gguf_pytorch_utils as gguf

    with torch.device("meta"):
        skeleton = model_class(config)
    load: Callable[..., dict[str, Any]] = gguf.load_gguf_checkpoint
    checkpoint = load(str(path), return_tensors=True, model_to_load=skeleton, torch_dtype=dtype)
    tensors = checkpoint["tensors"]
    assert isinstance(tensors, dict)
    return tensors


_ROWS = 256
"""Rows of the measured matrix, like the tokens of a chunk."""

_WIDTH_MAX = 4096
"""Maximum width of the matrices: larger ones are not faster."""

_MEASURE_S = 0.03
"""Long enough for a processor to reach full speed, short beside loading any model."""

_REPEATS_MAX = 64


def model_flops(loaded: LoadedModel) -> ModelFlops:
    """Count the operations of the layers, and measure the device's speed, in tens of ms.

    This is the cost model's first guess until steps are measured, so a factor of two does not
    matter here; its order of magnitude does.
    """
    weights = sum(
        parameter.numel()
        for name, parameter in loaded.model.named_parameters()
        if ".layers." in name and parameter.dim() > 1
    )
    config = loaded.config
    num_heads = int(getattr(config, "num_attention_heads", 1))
    return ModelFlops(
        per_token=2.0 * weights,
        # One multiply-add per dimension for the score, and one for the weighted sum.
        per_attended=4.0 * loaded.num_layers * num_heads * loaded.head_dim,
        per_s=_measure_flops(int(config.hidden_size), loaded.dtype, loaded.model.device),
    )


@torch.inference_mode()
def _measure_flops(width: int, dtype: torch.dtype, device: torch.device) -> float:
    """Return the operations per second of the fastest of some multiplications; 0 on failure."""
    width = min(width, _WIDTH_MAX)
    try:
        left = torch.ones((_ROWS, width), dtype=dtype, device=device)
        right = torch.ones((width, 4 * width), dtype=dtype, device=device)
        best_s = min(_matmul_seconds(left, right), default=0.0)
    except RuntimeError:  # out of memory, or a dtype without multiplication
        return 0.0
    return 2.0 * _ROWS * width * 4 * width / best_s if best_s else 0.0


def _matmul_seconds(left: torch.Tensor, right: torch.Tensor) -> list[float]:
    times: list[float] = []
    began_s = time.perf_counter()
    while len(times) < _REPEATS_MAX and time.perf_counter() - began_s < _MEASURE_S:
        start_s = time.perf_counter()
        product = left @ right
        if product.device.type == "cuda":
            torch.cuda.synchronize(product.device)
        times.append(time.perf_counter() - start_s)
    return times[1:] or times
