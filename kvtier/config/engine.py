"""Sections of the integrated engine, and of the client that every engine uses."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from kvtier.config.section import GIB, MIB, MS, SECOND, HostNames, ListenAddress, Section, setting
from kvtier.errors import ConfigError

__all__ = ["ClientConfig", "EngineConfig"]


class EngineConfig(Section):
    """The integrated engine with its OpenAI-compatible server."""

    model: Path | None = setting(
        None,
        "Directory with config.json, safetensors and tokenizer, or a GGUF file. If empty, no "
        "engine is started.",
        why="A daemon does not need an engine of its own.",
        shown="none",
        example="/models/SmolLM2-135M-Instruct",
    )
    device: str = setting(
        "cpu",
        "cpu, cuda, or one device as cuda:N.",
        why="Every machine has a CPU; a GPU is never used without being asked for.",
        pattern=r"^(cpu|cuda|cuda:\d{1,2})$",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "auto",
        "Number format of weights and KV. auto: float32 on cpu, for exact results, and bfloat16 on "
        "cuda.",
        why="Fast and accurate on each device.",
    )
    pool_bytes: int = setting(
        GIB,
        "Memory of the engine's KV pool, the GPU tier; allocated on its device at start.",
        why="Fits a workstation; on a GPU node use what the weights leave free.",
        ge=MIB,
    )
    block_tokens: int = setting(
        64,
        "Tokens per block, the unit that tiers store. Clients that share blocks need the same "
        "value.",
        why="Larger blocks move faster; smaller ones match more of a shared prefix.",
        ge=1,
        le=4096,
    )
    engine_block_tokens: int = setting(
        16,
        "Tokens per block of the engine's own pool; must divide block_tokens.",
        why="Common size for attention kernels, with little waste at the end.",
        ge=1,
        le=4096,
    )
    max_batch_tokens: int = setting(
        512,
        "Maximum number of tokens per step. Limits how long a long prompt delays requests already "
        "generating.",
        why="A step of a few hundred milliseconds on a CPU.",
        ge=1,
        le=2**20,
    )
    max_sequences: int = setting(
        64,
        "Maximum number of requests computed at once; others wait.",
        why="With more, each would get too small a share of the pool for its prompt.",
        ge=1,
        le=4096,
    )
    listen: ListenAddress = setting(
        ListenAddress("127.0.0.1", 8000),
        "Host and port of the OpenAI-compatible server.",
        why="Loopback, because no API key is needed by default.",
    )
    allowed_hosts: HostNames = ()
    cors_origins: tuple[
        Annotated[str, Field(pattern=r"^(\*|[a-z][a-z0-9+.-]*://[^/?#\sA-Z]+)$")], ...
    ] = setting(
        (),
        "Origins whose web pages may use the engine, as browsers send them: scheme, host and port, "
        "without a path. * allows any.",
        why="Otherwise any web site could use the engine of whoever visits it.",
        shown="none",
        example='["https://chat.example"]',
    )
    served_model_name: str = setting(
        "",
        "Model name in the API; empty: the name of the model's directory or file.",
        why="Clients usually use that name.",
        shown="the model's own",
        example="smollm2",
    )
    context_limit: int = setting(
        0,
        "Maximum length of a prompt and its answer in tokens; 0: the model's training length.",
        why="Answers get worse beyond the length that a model was trained for.",
        ge=0,
        le=2**27,
    )
    parse_special_in_messages: bool = setting(
        False,
        "Whether special tokens are parsed in chat messages. false: messages are plain text, and "
        "only the chat template inserts special tokens. Prompts of /v1/completions are always "
        "parsed.",
        why="Otherwise a message could impersonate other roles.",
    )
    tenant_from: Literal["request", "api_key"] = setting(
        "request",
        "What identifies a tenant. request: the cache_salt of the request; api_key: the API key "
        "that it authenticates with; its cache_salt is then ignored, so that nobody can use "
        "another tenant's.",
        why="Other servers do the same, and api_key needs keys.",
    )
    api_keys_file: Path | None = setting(
        None,
        "File with API keys, one per line; requests without one of them are refused. A changed "
        "file is used without a restart. Without a file no key is required, unless tenant_from is "
        "api_key, which then accepts any key.",
        why="On loopback no key is needed.",
        shown="none",
        example="/etc/kvtier/api-keys",
    )

    def conflicts(self) -> Iterable[ConfigError]:
        """Check that a block consists of whole engine blocks."""
        if self.block_tokens % self.engine_block_tokens:
            yield ConfigError(
                "engine.block_tokens",
                f"{self.block_tokens} is not a multiple of engine.engine_block_tokens, "
                f"{self.engine_block_tokens}",
                "use a multiple of it",
            )


class ClientConfig(Section):
    """How long an engine waits for the daemon before it recomputes."""

    lookup_deadline_ns: int = setting(
        250 * MS,
        "If a lookup takes longer, the daemon counts as unavailable and the prompt is computed.",
        why="A lookup takes about a millisecond.",
        ge=MS,
        le=60 * SECOND,
    )
    load_deadline_ns: int = setting(
        5 * SECOND,
        "If a load takes longer, the blocks that have arrived are used and the rest is recomputed.",
        why="The same as cost.wait_max: the daemon itself waits no longer.",
        ge=MS,
        le=10 * 60 * SECOND,
    )
    store_deadline_ns: int = setting(
        5 * SECOND,
        "If a store takes longer, it is abandoned and its engine blocks are freed.",
        why="The engine cannot use the blocks of a hung store.",
        ge=MS,
        le=10 * 60 * SECOND,
    )
    reconnect_ns: int = setting(
        SECOND,
        "Pause between attempts to connect to an unavailable daemon.",
        why="A daemon restarts within seconds, and an attempt costs almost nothing.",
        ge=10 * MS,
        le=10 * 60 * SECOND,
    )
