"""What an agent declares beside its code: persistence.yaml, and what comes of it.

`schema`, `sections`, `template` and `values` decide, and are pure; `reading` needs PyYAML, which is
imported when a file is there to be read; `config` keeps the values, in a session or in a folder.
"""

from __future__ import annotations
