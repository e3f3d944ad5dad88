"""The configuration: one TOML file, loaded into frozen models."""

from kvtier.config.engine import ClientConfig, EngineConfig
from kvtier.config.load import load_config, read_config
from kvtier.config.model import Config, DaemonConfig, HttpConfig, RpcConfig
from kvtier.config.section import ListenAddress
from kvtier.config.tiers import CpuConfig, TierSection

__all__ = [
    "ClientConfig",
    "Config",
    "CpuConfig",
    "DaemonConfig",
    "EngineConfig",
    "HttpConfig",
    "ListenAddress",
    "RpcConfig",
    "TierSection",
    "load_config",
    "read_config",
]
