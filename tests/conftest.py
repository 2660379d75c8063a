"""Session fixtures live one kind per file in tests/plugins/; real services are started once per session and shared."""

pytest_plugins = [f"tests.plugins.{name}" for name in ("vllm", "trainer", "sandbox", "prefect", "mlflow", "stack")]
