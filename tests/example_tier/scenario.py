"""A real daemon with the example tier: blocks leave the CPU tier and are restored from files.

``tests/integration/test_example_tier.py`` runs it with a kvtier that has the tier in its registry.
"""

from kvtier.core.residency import TierName
from kvtier.testing.child import work_directory
from kvtier.testing.running_node import RunningNode
from tests.integration.pattern import PatternEngine

BLOCKS = 6


def main() -> None:
    name = TierName("directory")
    with work_directory() as directory:
        files = directory / "blocks"
        settings = {
            "ssd.enabled": "false",
            f"{name}.enabled": "true",
            f"{name}.directory": str(files),
        }
        node = RunningNode(directory, settings)
        with node.daemon() as daemon, PatternEngine(node.socket) as engine:
            daemon.await_log("directory_tokens=32768")
            assert engine.store(1, BLOCKS) == BLOCKS
            node.await_idle()
            assert node.drop("cpu") == {"cpu": BLOCKS}
            assert engine.load(1, BLOCKS) == ([name] * BLOCKS, "complete")
            status = node.stat()
            assert status["tiers"][name]["blocks"] == BLOCKS
            assert status["transfers"]["directory_to_cpu"]["bytes"] == BLOCKS * 8192
            assert daemon.stop() == 0
        assert len(list(files.iterdir())) == BLOCKS
        with node.daemon(), PatternEngine(node.socket) as engine:
            assert engine.load(1, BLOCKS) == ([name] * BLOCKS, "complete"), "after a restart"
            assert node.drop(name) == {name: BLOCKS}
            assert not list(files.iterdir())


if __name__ == "__main__":
    main()
