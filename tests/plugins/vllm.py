"""Session fixtures: vllm."""
