"""An engine of another version, as a process: stores a prompt, reads it back, says how it went."""

import json
import sys
from pathlib import Path

from kvtier import __version__
from tests.integration.pattern import PatternEngine

socket_path, prompt = Path(sys.argv[1]), int(sys.argv[2])
with PatternEngine(socket_path) as engine:
    stored = engine.store(prompt)
    loaded, end = engine.load(prompt)
print(json.dumps({"version": __version__, "stored": stored, "loaded": loaded, "end": end}))
