"""An agent's folder, with the seed's own persistence.yaml in it, and a folder for its state."""

from __future__ import annotations

from pathlib import Path

import pytest

SEED = """\
# persistence.yaml
version: 1

# Key-value config that persists across sessions
# Values are initialized on first run, then preserved
config:
  zep_user_id:
    description: "Zep memory user ID for this agent"
    init: "{{ agent_name }}::{{ random_id }}"  # template evaluated on first run

  zep_session_id:
    description: "Current Zep session ID"
    init: "{{ agent_name }}-{{ timestamp }}"
    on_new_session: regenerate  # regenerate on each new session (default: preserve)

  user_name:
    description: "The user's preferred name"
    init: null  # starts empty, agent sets it during conversation

  theme:
    description: "User's preferred color theme"
    init: "default"

# Directories to persist across sessions (beyond the default snapshot)
# These paths are relative to the agent's home directory
persist_paths:
  - data/       # agent's data files
  - .config/    # agent config files
"""


class AgentFolder:
    """The folder of an agent's code."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.state = path / "state"
        path.mkdir()

    @property
    def yaml(self) -> Path:
        return self.path / "persistence.yaml"

    def declare(self, text: str) -> Path:
        """Write persistence.yaml, and return its path."""
        self.yaml.write_text(text, "utf-8")
        return self.yaml

    def name(self, text: str) -> None:
        (self.path / "agent.yaml").write_text(text, "utf-8")


@pytest.fixture
def folder(tmp_path: Path) -> AgentFolder:
    """Return a folder with the seed's example in it; the agent is called gus."""
    folder = AgentFolder(tmp_path / "gus")
    folder.declare(SEED)
    folder.name("name: gus\n")
    return folder
