"""Providers' models by name are played by a script; installed MCP servers are found by name."""

import os
import sys
from pathlib import Path

from perdure.agent import ScriptedModel, compaction, context


def played(name, **options):
    return ScriptedModel("Nobody.")


context.named_model = compaction.named_model = played
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
