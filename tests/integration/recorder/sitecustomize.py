"""Records which settings a process reads; Python imports it at start if its folder is on the path.

The name and value of each setting go to the file in ``KVTIER_TEST_READS``, one JSON list per line.
Reads by the configuration package itself and by checks before the start do not count.
"""

import json
import os
import sys

from kvtier.config.section import Section, key_of

NOT_A_USE = (
    "kvtier.config.load",
    "kvtier.config.model",
    "kvtier.config.section",
    "kvtier.config.toml_text",
    "kvtier.cli.preflight",
    "pydantic",
)
SECTIONS = {"Config"}
SEEN = set()
READS = os.open(os.environ["KVTIER_TEST_READS"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)


def recording(self, name):
    value = object.__getattribute__(self, name)
    section = type(self).__name__
    if name in type(self).__pydantic_fields__ and section not in SECTIONS:
        caller = sys._getframe(1).f_globals["__name__"]
        read = json.dumps([section, key_of(name), str(value)])
        if read not in SEEN and not caller.startswith(NOT_A_USE):
            SEEN.add(read)
            os.write(READS, f"{read}\n".encode())
    return value


Section.__getattribute__ = recording
