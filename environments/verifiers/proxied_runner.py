"""`__main__` of the folder that grades at trust `proxied`: `python3 -I -P .grader`. Shipped as data.

The process of the tests starts itself again with exactly its environment (which fixes the hash seed), then starts the
candidate's process from the same folder. Both take the folder off their path: everything of ours is imported by then, and the
candidate can write there.
"""

import os
import sys
from pathlib import Path

from environments.verifiers import proxied_candidate, proxied_tests

_FLAGS = ("-P", "-s", "-B")

if __name__ == "__main__":
    folder = str(Path(sys.path.pop(0)).resolve())
    role, *numbers = sys.argv[1:] or ["isolated"]
    if role == "candidate":
        reading, writing = map(int, numbers)
        proxied_candidate.main(reading, writing)
    elif sys.flags.isolated:
        os.execve(sys.executable, [sys.executable, *_FLAGS, folder, "tests"], proxied_tests.ENVIRONMENT)  # noqa: S606
    else:
        proxied_tests.main([sys.executable, *_FLAGS, folder, "candidate"])
    os._exit(0)
