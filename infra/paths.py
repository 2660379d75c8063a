"""Where things lie on this machine. Everything Bessemer writes is below one of these two folders.

`home()` is one installation's state (stack addresses, logs, databases, the default store): `$BESSEMER_HOME`, else `.bessemer`
in the current folder. `cache()` is shared by installations and can be deleted at any time (base models, root file systems):
`$BESSEMER_CACHE`, else `/var/cache/bessemer` for root (sandbox users must be able to reach it), else
`$XDG_CACHE_HOME/bessemer` or `~/.cache/bessemer`.
"""

from __future__ import annotations

import os
from pathlib import Path


def home() -> Path:
    return Path(os.environ.get("BESSEMER_HOME") or ".bessemer").resolve()


def cache() -> Path:
    chosen = os.environ.get("BESSEMER_CACHE")
    if chosen:
        return Path(chosen).resolve()
    if os.geteuid() == 0:
        return Path("/var/cache/bessemer")
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bessemer"
