"""One TOML file, turned into frozen models before anything is allocated."""

from kvtier.config.load import load_config
from kvtier.config.model import (
    Address,
    ClientConfig,
    Config,
    DaemonConfig,
    EngineConfig,
    HttpConfig,
    RpcConfig,
)
from kvtier.config.tiers import CpuConfig, RemoteConfig, SsdConfig

__all__ = [
    "Address",
    "ClientConfig",
    "Config",
    "CpuConfig",
    "DaemonConfig",
    "EngineConfig",
    "HttpConfig",
    "RemoteConfig",
    "RpcConfig",
    "SsdConfig",
    "load_config",
]
