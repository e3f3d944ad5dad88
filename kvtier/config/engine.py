"""The sections of the integrated engine and of what any engine links."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from kvtier.config.section import GIB, MIB, MS, SECOND, HostNames, ListenAddress, Section, why
from kvtier.errors import ConfigError

__all__ = ["ClientConfig", "EngineConfig"]


class EngineConfig(Section):
    """The integrated engine with its OpenAI-compatible server."""

    model: Path | None = Field(
        default=None,
        json_schema_extra=why(
            "A daemon needs no engine of its own.",
            shown="none",
            example="/models/SmolLM2-135M-Instruct",
        ),
        description="Folder with config.json, safetensors and tokenizer, or a GGUF file. Without "
        "one no engine is started.",
    )
    device: str = Field(
        default="cpu",
        pattern=r"^(cpu|cuda|cuda:\d{1,2})$",
        json_schema_extra=why("Every machine has one; a device is never taken unasked."),
        description="cpu, cuda, or one device as cuda:N.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto",
        json_schema_extra=why("What each device is fast and right with."),
        description="Number format of weights and KV. auto: float32 on cpu, where results are "
        "exact, and bfloat16 on cuda.",
    )
    pool_bytes: int = Field(
        default=GIB,
        ge=MIB,
        json_schema_extra=why("Fits a workstation; a GPU node gives it what the weights leave."),
        description="Memory of the engine's KV pool, the GPU tier, taken at start on its device.",
    )
    block_tokens: int = Field(
        default=64,
        ge=1,
        le=4096,
        json_schema_extra=why(
            "Larger blocks move faster; smaller ones find more of a shared prefix."
        ),
        description="Tokens of a block, the unit that tiers keep. Clients that share blocks need "
        "the same.",
    )
    engine_block_tokens: int = Field(
        default=16,
        ge=1,
        le=4096,
        json_schema_extra=why("What attention kernels like, and little is wasted at the end."),
        description="Tokens of one block of the engine's own pool; a divisor of block_tokens.",
    )
    max_batch_tokens: int = Field(
        default=512,
        ge=1,
        le=2**20,
        json_schema_extra=why("A step of some hundred milliseconds on a CPU."),
        description="Tokens of one step. Bounds how long a long prompt holds up those that are "
        "being answered.",
    )
    max_sequences: int = Field(
        default=64,
        ge=1,
        le=4096,
        json_schema_extra=why("More would share the pool in pieces too small for their prompts."),
        description="Requests that are computed at once; others wait.",
    )
    listen: ListenAddress = Field(
        default=ListenAddress("127.0.0.1", 8000),
        json_schema_extra=why("Loopback, because no API key is needed by default."),
        description="Host and port of the OpenAI-compatible server.",
    )
    allowed_hosts: HostNames = ()
    cors_origins: tuple[
        Annotated[str, Field(pattern=r"^(\*|[a-z][a-z0-9+.-]*://[^/?#\sA-Z]+)$")], ...
    ] = Field(
        default=(),
        json_schema_extra=why(
            "Pages of other origins are refused; otherwise any site could use a visitor's engine.",
            shown="none",
            example='["https://chat.example"]',
        ),
        description="Origins whose web pages may use the engine, as browsers send them: scheme, "
        "host and port, without a path. * allows any.",
    )
    served_model_name: str = Field(
        default="",
        json_schema_extra=why(
            "What the folder is called is what people ask for.",
            shown="the model's own",
            example="smollm2",
        ),
        description="Name under which the model is served; empty: the name of its folder or file.",
    )
    context_limit: int = Field(
        default=0,
        ge=0,
        le=2**27,
        json_schema_extra=why("Answers get worse beyond the length a model was trained for."),
        description="Most tokens of a prompt and its answer; 0: what the model was trained for.",
    )

    parse_special_in_messages: bool = Field(
        default=False,
        json_schema_extra=why("With it, a message can pose as messages of other roles."),
        description="Whether special tokens are parsed in chat messages. false: messages are "
        "plain text, and only the chat template writes special tokens. Prompts of "
        "/v1/completions are always parsed.",
    )

    tenant_from: Literal["request", "api_key"] = Field(
        default="request",
        json_schema_extra=why("As other servers have it; api_key needs keys."),
        description="What separates tenants. request: the cache_salt that a request carries; "
        "api_key: the key it authenticates with, and its cache_salt is ignored, so that nobody "
        "can name another's.",
    )
    api_keys_file: Path | None = Field(
        default=None,
        json_schema_extra=why(
            "On loopback nobody needs one.", shown="none", example="/etc/kvtier/api-keys"
        ),
        description="File with one API key a line; requests without one of them are refused, and "
        "others in the file count without a restart. Without the file nobody is asked for a key "
        "unless tenant_from is api_key, which then takes any.",
    )

    def conflicts(self) -> Iterable[ConfigError]:
        """Check that a block is a whole number of engine blocks."""
        if self.block_tokens % self.engine_block_tokens:
            yield ConfigError(
                "engine.block_tokens",
                f"{self.block_tokens} is no multiple of engine.engine_block_tokens, "
                f"{self.engine_block_tokens}",
                "make a block a whole number of engine blocks",
            )


class ClientConfig(Section):
    """How long an engine waits for the daemon before it recomputes."""

    lookup_deadline_ns: int = Field(
        default=250 * MS,
        ge=MS,
        le=60 * SECOND,
        json_schema_extra=why("A lookup takes about a millisecond."),
        description="After this the daemon counts as away, and the prompt is computed.",
    )
    load_deadline_ns: int = Field(
        default=5 * SECOND,
        ge=MS,
        le=10 * 60 * SECOND,
        json_schema_extra=why("As long as cost.wait_max: the daemon itself waits no longer."),
        description="After this the blocks that have come are used and the rest is recomputed.",
    )
    store_deadline_ns: int = Field(
        default=5 * SECOND,
        ge=MS,
        le=10 * 60 * SECOND,
        json_schema_extra=why("The blocks of a store that hangs are missing to the engine."),
        description="After this a store is given up and its engine blocks are free again.",
    )
    reconnect_ns: int = Field(
        default=SECOND,
        ge=10 * MS,
        le=10 * 60 * SECOND,
        json_schema_extra=why("A daemon is back within seconds, and asking costs next to nothing."),
        description="Pause between attempts to reach a daemon that is away.",
    )
