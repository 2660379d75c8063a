"""The conformance suite: what every sandbox backend must show, on a user's own host as well as in CI.

One file a theme; a check is a function with a docstring that says what is shown (check.py), acts through a `Lab` (lab.py) and
is run by suite.py. `bessemer sandbox check` prints the table; tests/conformance runs the same checks against every backend. A
new promise in the contract (environments/sandbox/base.py) is a new check here first.
Gaps: what needs a container's settings loosened, or an owner killed, cannot be shown on a user's host and is tested in
tests/conformance only. With a remote engine the checks that look at the host see the worker's host, not the engine's.
"""
