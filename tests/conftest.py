"""Session fixtures live one kind per file in tests/plugins/; real services are started once per session and shared."""

kinds = ("leash", "stack", "vllm", "trainer", "sandbox", "engine", "prefect", "mlflow")
pytest_plugins = [f"tests.plugins.{kind}" for kind in kinds]
